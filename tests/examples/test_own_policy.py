"""The example of a policy of one's own: it runs as its docstring and its page say."""

from pathlib import Path

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(monkeypatch):
    """The example's folder is the working folder."""
    monkeypatch.chdir(ROOT / "examples/policies")


def test_the_example_allocates_with_a_certificate(here):
    """In its own folder, with the jobs beside it."""
    found = CliRunner().invoke(
        main,
        ["allocate", "--policy", "deadline_first:deadline_first", "--input", "jobs.json", "--output", "json"],
    )
    assert found.exit_code == 0, found.output
    assert '"status": "optimal"' in found.stdout


@pytest.mark.slow
def test_the_example_simulates(here):
    arguments = ["--static", "6", "--seed", "0", "--cluster", "v100=8,p100=8,k80=8", "--output", "json"]
    found = CliRunner().invoke(main, ["simulate", "--policy", "deadline_first:deadline_first", *arguments])
    assert found.exit_code == 0, found.output


def test_the_page_shows_the_example():
    """The function stands on the page as in the file, without its annotations."""
    page = (ROOT / "docs/policy-of-your-own.md").read_text()
    code = (ROOT / "examples/policies/deadline_first.py").read_text()
    body = code.split('"""Maximise progress')[1]
    assert body.strip() in page


def test_an_error_of_the_function_ends_the_command_with_its_text(tmp_path, monkeypatch):
    """Exit code 2, one line, no traceback."""
    (tmp_path / "mine_is_broken.py").write_text("def fair(cluster):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for command in (["allocate", "--input", str(ROOT / "examples/policies/jobs.json")],):
        found = CliRunner().invoke(main, [*command, "--policy", "mine_is_broken:fair"])
        assert found.exit_code == 2
        assert "raised ZeroDivisionError: division by zero" in found.output.replace("\n", " ")
        assert "line 2" in found.output
