"""The families of elastic instances that the benchmark measures."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[4]
_spec = importlib.util.spec_from_file_location("elastic_families", ROOT / "benchmarks/allocation/elastic.py")
assert _spec is not None
assert _spec.loader is not None
elastic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elastic)
FAMILIES = {family.name: family for family in elastic.FAMILIES}
