"""The notebooks of ``examples/notebooks`` run as they are: their cells, one after the other."""

import ast
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a notebook; returns what its cells have defined, and what each of them shows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    defined = {}

    def run(name):
        shown = []
        for cell in json.loads((NOTEBOOKS / name).read_text())["cells"]:
            if cell["cell_type"] != "code":
                continue
            tree = ast.parse("".join(cell["source"]))
            last = [tree.body.pop()] if isinstance(tree.body[-1], ast.Expr) else []
            exec(compile(tree, name, "exec"), defined)
            shown += [eval(compile(ast.Expression(node.value), name, "eval"), defined) for node in last]
        return defined, shown

    yield run
    if "training" in defined and defined["training"].poll() is None:
        defined["training"].terminate()
        defined["training"].wait()


@pytest.mark.processes
def test_a_notebook_shows_the_pipeline_move(run):
    """Layers leave the rank that has too many, then the rank that another job gets; the loss falls."""
    defined, (*_, rebalanced, repacked, losses) = run("pipeline-that-moves.ipynb")
    moves = [(event, [stage["endLayer"] for stage in stages]) for _, event, stages, _ in repacked.rows()]
    assert moves[0] == ("launch", [1, 7, 8])
    (two,) = [ends for event, ends in moves if event == "repack"]
    assert len(two) == 2 and all(ends[-1] == 8 for _, ends in moves)
    (_, even), *_ = [move for move in moves if move[0] == "rebalance"]
    # The middle rank has lost layers.
    assert even[1] - even[0] < 6
    assert rebalanced.rows()[1][1] == "rebalance"
    assert ">6</span>" in rebalanced._repr_html_()
    assert losses[-1] < losses[0]
    assert defined["training"].returncode == 75
