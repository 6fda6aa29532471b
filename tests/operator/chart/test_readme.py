"""The chart's README names every value of the chart."""

from pathlib import Path

import yaml

from scripts.generated_files import chart_readme

VALUES = Path(__file__).parents[3] / "charts/ballast/values.yaml"


def test_each_top_level_value_of_the_chart_is_in_its_readme():
    """Nothing that may be set is missing from the table."""
    page = chart_readme(VALUES.read_text())
    missing = [key for key in yaml.safe_load(VALUES.read_text()) if f"| `{key}" not in page]
    assert not missing


def test_a_group_has_its_comment_and_its_values_have_their_defaults():
    """A group's default is its values'; a flow mapping is one value."""
    page = chart_readme("# Why.\nouter:\n  # What.\n  inner: 3\n  flow: {a: 1}\nbare:\n  x: [1]\n")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `outer` |  | Why. |",
        "| `outer.inner` | `3` | What. |",
        '| `outer.flow` | `{"a": 1}` |  |',
        "| `bare.x` | `[1]` |  |",
    ]
