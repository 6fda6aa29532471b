"""Folders and files stay small enough to find one's way in them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "policies/ballast_policies",
    "operator/ballast_operator",
    "trainer-image/ballast_trainer",
    "client/ballast_client",
    "localcluster/ballast_localcluster",
    "benchmarks",
    "tests",
)
MAX_FILES = 15
MAX_LINES = 300


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_holds_more_than_fifteen_modules(folder):
    """A larger one gets folders whose names say what is in them."""
    folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    counts = {
        str(each.relative_to(ROOT)): len([file for file in each.glob("*.py") if file.name != "__init__.py"])
        for each in folders
    }
    assert {name: count for name, count in counts.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_longer_than_three_hundred_lines(folder):
    """A longer one has two subjects, and becomes two modules."""
    files = (ROOT / folder).rglob("*.py")
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}
