"""Checkpoints of a script are whole, and the newest is found."""

import pytest
from ballast_client import Checkpoints


def test_the_newest_is_found_and_older_ones_go(tmp_path):
    """By number, not by name: step-10 is newer than step-9."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.newest() is None
    for step in (8, 9, 10):
        checkpoints.save(step, lambda path, step=step: path.write_text(str(step)))
    step, path = checkpoints.newest()
    assert (step, path.read_text()) == (10, "10")
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-10", "step-9"]


def test_a_checkpoint_that_is_not_whole_does_not_count(tmp_path):
    """Neither where the process was killed while it wrote, nor where writing failed."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, lambda path: path.mkdir())

    def fails(path):
        path.mkdir()
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fails)
    assert checkpoints.newest()[0] == 1
    checkpoints.save(2, lambda path: path.write_text("whole"))
    assert checkpoints.newest()[1].read_text() == "whole"


def test_a_function_that_writes_elsewhere_is_told(tmp_path):
    """Otherwise the job would resume from nothing."""
    with pytest.raises(FileNotFoundError, match="To fix: write the checkpoint to the path"):
        Checkpoints(tmp_path).save(1, lambda path: None)
