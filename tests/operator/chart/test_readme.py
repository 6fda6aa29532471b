"""The table of values in the chart's README."""

from scripts.generated_files import chart_readme


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
