"""torch's unstable names stay in one file, so that an upgrade of torch is a change of one file."""

import ast
from pathlib import Path

import ballast_trainer
import pytest

PACKAGE = Path(ballast_trainer.__file__).parent
ONLY_IN = {"torch.distributed.pipelining": "pipeline/torch_pipeline.py"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.slow
@pytest.mark.parametrize("module", ONLY_IN)
def test_an_unstable_module_of_torch_is_imported_in_one_file_alone(module):
    """The file that wraps torch's pipeline imports it; no other file of the trainer does."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name == module or name.startswith(f"{module}.") for name in imported(path))
    }
    assert users == {ONLY_IN[module]}
