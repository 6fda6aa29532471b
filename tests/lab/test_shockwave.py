"""Shockwave's traces: files in the form of its artifact, made by hand."""

import json

import numpy as np
import pytest
from ballast_lab.shockwave import fairness, main
from click.testing import CliRunner


def row(gpus, seconds, arrival):
    return f"LM (batch size 5)\tcmd\tdir\t--steps\t1\t100\t{gpus}\tgns\t1\t-1.0\t{seconds}\t{arrival}"


def write(folder, trace, published):
    (folder / "x.trace").write_text("\n".join(trace))
    (folder / "published_results.json").write_text(json.dumps(published))
    return CliRunner().invoke(main, ["--data", str(folder)])


def test_fairness_is_over_the_time_alone_and_the_jobs_that_were_there():
    """One GPU; the second job waits for the first: its 3 jobs-seconds of contention over 2 s are 1.5."""
    took = fairness(np.array([0.0, 0.0]), np.array([1.0, 2.0]), np.array([1.0, 1.0]), gpus=1)
    assert took.tolist() == pytest.approx([1.0 / 2.0, 2.0 / 1.5])


def test_jobs_run_as_long_alone_as_the_published_times_and_fairness_say(tmp_path):
    """Two jobs on two GPUs: 100 s that are twice the isolated time are 50 s alone, not the trace's 80."""
    run = {
        "policy": "themis",
        "jct_list": [100.0, 100.0],
        "finish_time_fairness_list": [2.0, 2.0],
        "finish_time_fairness_themis_list": [2.0, 2.0],
    }
    done = write(tmp_path, [row(1, 80, 0), row(1, 80, 0)], {"two_2gpus/themis_simulation": run})
    assert done.exit_code == 0, done.output
    ours = [line.split() for line in done.output.splitlines() if line.startswith("max-min-fairness")]
    assert [line[-5:] for line in ours] == [["50", "50", "1.000", "1.000", "0%"]] * 2
    assert "within 0.0% of the published" in done.output


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        ([row(1, 80, 0), row("two", 80, 0)], "x.trace:2: GPUs: 'two' is no number"),
        ([row(1, 80, 5), row(1, 80, 4)], "x.trace:2: 1 GPUs at 4 s: not whole, or not in order"),
        (["a\tb"], "x.trace:1: 2 columns, not 12"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused_with_its_number_and_value(tmp_path, trace, named):
    done = write(tmp_path, trace, {})
    assert done.exit_code == 1
    assert named in done.output
