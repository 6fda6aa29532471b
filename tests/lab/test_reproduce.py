"""``ballast reproduce``: each figure's program is there and runs."""

import ast
import dataclasses
import runpy
import sys

import pytest
from ballast_lab.catalogue import CHECKOUT, FIGURES, Figure
from ballast_operator.cli.main import main
from click.testing import CliRunner

REFERENCES = {"arena", "cant-be-late", "sailor", "shockwave", "skynomad"}


def ballast(*words):
    return CliRunner().invoke(main, ["reproduce", *words])


@pytest.mark.parametrize("program", sorted({figure.program for figure in FIGURES.values()} - {""}))
def test_every_program_can_be_imported_and_has_the_parts_that_are_named(program, monkeypatch):
    """A program that is run whole has an entry; the pages exist."""
    figures = [figure for figure in FIGURES.values() if figure.program == program]
    path = figures[0].path
    if not program.startswith("ballast_lab/"):
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    found = runpy.run_path(str(path))
    for figure in figures:
        assert callable(found[figure.part or "main"])
        assert figure.page
        assert (CHECKOUT / figure.page).is_file()
    if not all(figure.part for figure in figures):
        assert "__main__" in ast.unparse(ast.parse(path.read_text()).body[-1])


def test_all_of_them_are_listed_with_what_they_need():
    """The five references among them, each with the artifact's folder."""
    done = ballast()
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == list(FIGURES)
    assert {figure.artifact for figure in FIGURES.values()} == {"", *REFERENCES}


def test_a_name_that_is_none_is_answered_with_those_near_it():
    done = ballast("gavel-5.8")
    assert done.exit_code == 2
    assert "'gavel-5.8' is no figure; did you mean gavel-5.9 or" in done.output
    assert "did you mean gavel-5.12-5.13?" in ballast("gavel-5.12-").output
    assert "leave one of them out" in ballast("sailor", "--all").output


def test_a_figure_is_printed_beside_what_was_published():
    """Table I of SEMI-migration within 3 % of the paper, table 4.2 to its digits, 6 of the degrees of 4.1."""
    done = ballast("semi-table-1")
    assert done.exit_code == 0, done.output
    assert '"gamma": 0.25, "published": 425' in done.output
    days = ballast("ptdp-4.2").output
    assert "| 1 trillion (4.5.1) | 3072 | 163 | 84 | 83.9 | -0.1 % |" in days
    assert "| ZeRO-3 | 174.6 | 1536 | 44 | 74 | 73.7 | -0.4 % |" in days
    assert ballast("ptdp-4.1-degrees").output.count("the same") == 6
    assert "| 64 | almost 30 | 31.0 |" in ballast("2bw-3.9").output


def test_a_figure_of_other_peoples_files_says_what_it_needs(tmp_path):
    """Without --data, and where the program refuses the folder."""
    assert "python -m ballast_lab.sailor --help" in ballast("sailor").output
    done = ballast("sailor", "--data", str(tmp_path))
    assert done.exit_code == 1
    assert "sailor" in done.output


def test_a_figure_that_is_not_made_says_why_and_fails():
    done = ballast("pipedream-2.9")
    assert done.exit_code == 2
    assert "not made: trains VGG-16 on ImageNet" in done.output
    for figure in FIGURES.values():
        assert bool(figure.program) != bool(figure.why_not)


def test_a_value_outside_its_band_fails_unless_it_is_known(monkeypatch):
    """The band and ours are printed, and the reason where there is one; one more than is known fails."""
    known = ballast("ptdp-4.1-degrees")
    assert known.exit_code == 0
    assert "inside their band: 6 of 10" in known.output
    assert "outside: 145.6 billion: 0, not 1 to 1\n" in known.output
    assert "known of 4: a tensor degree of 8" in known.output
    fewer = dataclasses.replace(FIGURES["ptdp-4.1-degrees"], outside=3)
    monkeypatch.setitem(FIGURES, "ptdp-4.1-degrees", fewer)
    done = ballast("ptdp-4.1-degrees")
    assert done.exit_code == 1
    assert "4 of 10 outside their band" in done.output
    assert all(bool(figure.known) == bool(figure.outside) for figure in FIGURES.values())


def test_a_figure_that_judges_nothing_fails(monkeypatch, tmp_path):
    """A program whose input was empty, or of which no plan could be predicted, has shown nothing."""
    empty = tmp_path / "empty.py"
    empty.write_text("from ballast_lab.comparison import Comparison\nmain = lambda: Comparison(())\n")
    monkeypatch.setitem(FIGURES, "empty", Figure(source="", program=str(empty), part="main"))
    done = ballast("empty")
    assert done.exit_code == 1
    assert "it judged nothing" in done.output


def test_all_runs_what_it_can_and_says_of_the_others_why_not(monkeypatch):
    """A program that fails stops nobody and is named at the end."""
    from ballast_lab.commands import reproduce

    broken = Figure(source="", program="ballast_lab/sia.py", part="none")
    away = Figure(source="", program="lab/benchmarks/away.py")
    names = ("sailor", "ptdp-4.1", "ptdp-4.8", "amp-6-11")
    some = {"broken": broken, "away": away, **{name: FIGURES[name] for name in names}}
    monkeypatch.setattr(reproduce, "FIGURES", some)
    done = ballast("--all")
    assert done.exit_code == 1
    assert "1 of 6 failed: broken" in done.output
    assert "6 figures, 2 not run\ninside: 1\noutside: 1: ptdp-4.8\n" in done.output
    assert "without a band: 1: amp-6-11\n" in done.output
    assert "not run: lab/benchmarks/away.py is in Ballast's repository alone" in done.output
    assert "To fix: --data FOLDER" in done.output
    assert "| 24 | 2304 | 1.7 |" in done.output
