"""Folders and files stay small enough to find one's way in them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "policies/ballast_policies",
    "operator/ballast_operator",
    "trainer-image/ballast_trainer",
    "client/ballast_client",
    "localcluster/ballast_localcluster",
)
MAX_FILES = 15
MAX_LINES = 300


@pytest.mark.parametrize("package", (*PACKAGES, "benchmarks", "tests"))
def test_no_folder_holds_more_than_fifteen_modules(package):
    """A larger one gets folders whose names say what is in them."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    counts = {
        str(folder.relative_to(ROOT)): len([f for f in folder.glob("*.py") if f.name != "__init__.py"])
        for folder in folders
    }
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("package", (*PACKAGES, "tests"))
def test_no_module_is_longer_than_three_hundred_lines(package):
    """A longer one has two subjects, and becomes two modules."""
    files = (ROOT / package).rglob("*.py")
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}
