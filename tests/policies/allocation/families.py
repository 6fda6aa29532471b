"""The families of instances that the benchmarks measure: of gangs, and of elastic jobs."""

import importlib.util
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "allocation"


def _benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"allocation_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAMILIES = {family.name: family for family in _benchmark("families").FAMILIES}
ELASTIC = {family.name: family for family in _benchmark("elastic").FAMILIES}
