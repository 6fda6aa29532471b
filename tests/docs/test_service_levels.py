"""Pages whose rows and links are checked: service levels, the threat model, the README."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page_of(folder, figures):
    specification = importlib.util.spec_from_file_location(
        "service_levels", ROOT / "scripts/service_levels.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    run = {
        "label": "a run",
        "jobs": 10,
        "running": 1,
        "nodes": 2,
        "figures": figures,
        "machine": {"cores": 2, "loadAverageAtStart": [1.0], "loadAverageAtEnd": [2.0]},
    }
    benchmarks = folder / "benchmarks/operator"
    (benchmarks / "emulated").mkdir(parents=True)
    ranges = ROOT / "benchmarks/operator/emulated/ranges.json"
    (benchmarks / "emulated/ranges.json").write_text(ranges.read_text())
    (benchmarks / "scale_recorded.json").write_text(json.dumps([run]))
    return module.service_levels(folder)


def test_a_figure_outside_its_range_is_marked(tmp_path):
    """A reader sees at once what does not hold; what was not measured is not passed over."""
    page = page_of(tmp_path, {"healthzMaxSeconds": 0.1, "failoverSeconds": 99.0})
    rows = {row.split("(`")[1].split("`)")[0]: row for row in page.splitlines() if "(`" in row}
    assert rows["healthzMaxSeconds"].endswith("| at most 0.5 | 0.1 | 0.1 |")
    assert rows["failoverSeconds"].endswith("| 99 | **99** |")
    assert "not measured" in rows["operatorMemoryMiB"]
    assert "10 jobs, 2 nodes, 2 cores, load average 1.0 to 2.0" in page


PAGE = ROOT / "docs" / "threat-model.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())


def test_every_test_that_the_page_names_exists():
    """A stop that lost its test would be a promise."""
    assert len(NAMED) > 20
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert missing == []


def test_the_readmes_links_lead_somewhere():
    """Every relative link names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
