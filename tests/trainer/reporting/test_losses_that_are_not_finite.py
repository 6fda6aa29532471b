"""A loss that is NaN although its gradients are finite, as where all targets of a microbatch are ignored."""

import io
import json
import math

from ballast_policies.contract import Report
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.reporting.console import JsonReporter

from tests.support.one_process import train_here
from tests.trainer.models.small_vocabulary import batches

IGNORED = -100


def some_ignored():
    """All targets of steps 2 and 3 are ignored."""
    plain = batches(step=-1, vocabulary=64, length=8)

    def batch(seed, step, size):
        inputs, targets = plain(seed, step, size)
        return inputs, targets.fill_(IGNORED) if step in (1, 2) else targets

    return batch


def test_training_continues_and_says_so_and_the_operator_still_hears_of_it(tmp_path, caplog):
    """Reports go on, without a loss where it is not a number."""
    config = {
        "totalSteps": 5,
        "model": {"name": "tests.trainer.models.small_vocabulary:build"},
        "data": {"name": f"{__name__}:some_ignored"},
        "pipeline": {"microbatches": 2, "globalBatchSize": 4},
        "rebalance": {"enabled": False},
        "metrics": {"jsonLines": str(tmp_path / "lines")},
    }
    told = train_here(config, channel=DirectoryChannel(tmp_path))
    assert [math.isnan(told.losses[step]) for step in range(1, 6)] == [False, True, True, False, False]
    assert caplog.text.count("the loss of step 2 is nan; its gradients are finite") == 1
    assert "the loss of step 3" not in caplog.text
    report = Report.from_json((tmp_path / "report.json").read_text())
    assert (report.step, report.loss) == (5, told.losses[5])
    assert (tmp_path / "finished-step").read_text() == "5"
    lines = [json.loads(line, parse_constant=int) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line][1:3] == [None, None]


def test_lines_have_null_for_it(tmp_path):
    """JSON has no NaN, and strict readers refuse it."""
    out = io.StringIO()
    JsonReporter(out).step(step=1, loss=math.nan)
    assert json.loads(out.getvalue(), parse_constant=int) == {"step": 1, "loss": None}
