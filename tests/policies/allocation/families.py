"""The families of instances that the benchmark measures."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location(
    "allocation_families", ROOT / "benchmarks" / "allocation" / "families.py"
)
assert _spec is not None
assert _spec.loader is not None
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)
FAMILIES = {family.name: family for family in families.FAMILIES}
