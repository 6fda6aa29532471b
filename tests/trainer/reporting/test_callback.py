"""The user's callback: what it is told, and what follows where it raises."""

import json
import logging
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.output import CallbackConfig, CallbackError
from ballast_policies.contract.messages import ExitCode, ExitReason
from ballast_trainer.causes import describe, explains_itself
from ballast_trainer.distributed.activity import tell_compilations
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.reporting.callback import CallbackFailed, CallingReporter, StopTraining
from ballast_trainer.reporting.console import SilentReporter
from torch import nn

from tests.support.one_process import train_here
from tests.support.waiting import eventually

TOLD = []


def noting(event, step, values, *, label=None):
    TOLD.append((event, step, sorted(values), label))
    torch.rand(3)
    values.clear()


def without_gradients(event, step, values):
    torch.set_grad_enabled(False)


def failing(event, step, values, at=2, **settings):
    if step == at:
        raise KeyError("no channel")


def leaving(event, step, values):
    raise SystemExit(0)


def job(small_config, tmp_path, **callback):
    return small_config(
        totalSteps=3,
        model={"name": "gpt", "layers": 4, "args": {"dim": 16, "heads": 2, "context": 8, "dropout": 0.1}},
        evaluation={"everySteps": 2, "batches": 1},
        checkpoint={"path": str(tmp_path), "everySteps": 2, "asyncMode": "disabled"},
        callback=callback,
    )


@pytest.mark.slow
def test_it_is_told_of_steps_evaluations_and_checkpoints(small_config, tmp_path):
    """In the order in which they happen, with plain values and its own arguments; training is the same."""
    TOLD.clear()
    config = job(small_config, tmp_path / "a", name=f"{__name__}:noting", args={"label": "mine"})
    told = train_here(config)
    assert [(event, step) for event, step, _, _ in TOLD] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("checkpoint", 3),
        ("evaluation", 3),
    ]
    names = {event: values for event, _, values, _ in TOLD}
    assert {"loss", "step_seconds", "stages"} <= set(names["step"])
    assert names["evaluation"] == ["batches", "pause_ms", "validation_loss"]
    assert names["checkpoint"] == ["path", "pause_ms", "write_ms"]
    assert {label for *_, label in TOLD} == {"mine"}
    del config["callback"]
    assert train_here(config | {"checkpoint": {"path": str(tmp_path / "b")}}).losses == told.losses


def test_one_that_turns_gradients_off_does_not_do_so_for_the_training():
    """The mode is torch's for the whole thread."""
    CallingReporter(SilentReporter(), CallbackConfig(name=f"{__name__}:without_gradients")).step(step=1)
    assert torch.is_grad_enabled()


def test_its_error_ends_the_job_with_its_name(small_config, tmp_path):
    """What the user reads has the function, the step, the event and the error, and a traceback before it."""
    config = job(small_config, tmp_path, name=f"{__name__}:failing")
    with pytest.raises(CallbackFailed) as caught:
        train_here(config)
    assert describe(caught.value) == (
        f"callback.name: {__name__}:failing raised after step 2 (step): KeyError: 'no channel'. "
        "To fix: the callback, or callback.onError: report"
    )
    assert not explains_itself(caught.value)


@pytest.mark.slow
def test_its_error_is_reported_once_where_training_is_to_continue(small_config, tmp_path, caplog):
    """Every step is trained; each event's error is one warning."""
    config = job(small_config, tmp_path, name=f"{__name__}:failing", args={"at": 2, "x": 1}, onError="report")
    with caplog.at_level(logging.WARNING, "ballast_trainer.reporting.callback"):
        assert sorted(train_here(config).losses) == [1, 2, 3]
    assert [record.args[0].partition("after ")[2][:20] for record in caplog.records] == [
        "step 2 (step): KeyEr",
        "step 2 (evaluation):",
        "step 2 (checkpoint):",
    ]
    reporter = CallingReporter(
        SilentReporter(), CallbackConfig(name=f"{__name__}:leaving", on_error=CallbackError.REPORT)
    )
    caplog.clear()
    for step in (1, 2, 3):
        reporter.step(step=step, loss=1.0)
    assert len(caplog.records) == 1


def test_a_callback_that_leaves_does_not_end_the_rank_as_if_it_were_done():
    """``sys.exit(0)`` in it is an error."""
    reporter = CallingReporter(SilentReporter(), CallbackConfig(name=f"{__name__}:leaving"))
    with pytest.raises(CallbackFailed, match="SystemExit"):
        reporter.step(step=1, loss=1.0)


def test_one_that_cannot_be_loaded_is_refused():
    with pytest.raises(ConfigurationError, match=r"callback.name: cannot load 'no_such:thing'.*To fix"):
        CallingReporter(SilentReporter(), CallbackConfig(name="no_such:thing"))


def stopping(event, step, values, *, on, at, reason="enough"):
    if event == on and step >= at:
        raise StopTraining(reason)


ASKS = {
    "a step": ("step", 3, 3),
    "an evaluation": ("evaluation", 1, 4),
    "a checkpoint": ("checkpoint", 3, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize(("on", "at", "ends"), ASKS.values(), ids=ASKS)
def test_it_ends_the_job_after_the_step_it_was_told_of(small_config, tmp_path, on, at, ends):
    """As after the last step: saved, evaluated once, exported; a launch that follows trains no step."""
    exported = tmp_path / "model.safetensors"
    config = job(
        small_config, tmp_path / "a", name=f"{__name__}:stopping", args={"on": on, "at": at}, onError="report"
    ) | {
        "totalSteps": 8,
        "evaluation": {"everySteps": 4, "batches": 1},
        "checkpoint": {"path": str(tmp_path / "a"), "everySteps": 6, "asyncMode": "disabled"},
        "export": {"path": str(exported)},
    }
    told = train_here(config)
    assert (told.reason, max(told.losses)) == (ExitReason.FINISHED, ends)
    assert sorted(told.evaluations()) == sorted({ends} | ({4} if ends >= 4 else set()))
    assert [e["step"] for e in told.events if e["event"] == "evaluation"] == sorted(told.evaluations())
    assert {"event": "endedEarly", "step": ends, "reason": "enough"} in told.events
    assert exported.exists()
    exported.unlink()
    again = train_here(config)
    assert (again.reason, again.losses, exported.exists()) == (ExitReason.FINISHED, {}, True)
    assert again.evaluations()[ends] == told.evaluations()[ends]
    del config["callback"]
    assert sorted(train_here(config).losses) == list(range(ends + 1, 9))


@pytest.mark.slow
def test_without_a_flush_the_pipeline_drains_before_the_end(small_config, tmp_path):
    """The ranks are at different steps when it asks: they meet at one step, which is saved."""
    config = job(small_config, tmp_path, name=f"{__name__}:stopping", args={"on": "step", "at": 2})
    config["pipeline"]["schedule"] = "PipeDream2BW"
    told = train_here(config | {"totalSteps": 50})
    ends = max(told.losses)
    assert (told.reason, 2 <= ends < 50) == (ExitReason.FINISHED, True)
    assert (tmp_path / f"step-{ends:08d}").exists()


def asking_on_rank_1(event, step, values):
    if os.environ["RANK"] == "1" and (event, step) == ("step", 2):
        raise StopTraining


@pytest.mark.processes
def test_all_ranks_end_after_the_step_that_one_was_told_of(gang, small_config):
    """A rank other than 0 asks, and gives no reason."""
    config = small_config(totalSteps=9, callback={"name": f"{__name__}:asking_on_rank_1", "everyRank": True})
    ranks = gang(config, ranks=2)
    assert set(ranks.exit_codes().values()) == {0}
    assert sorted(ranks.losses()) == [1, 2]
    assert ranks.events("endedEarly") == [{"event": "endedEarly", "step": 2, "reason": "no reason given"}]


class Held(nn.Module):
    """A layer that waits in evaluations, on the last rank."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, value):
        if not self.training and dist.get_rank() == dist.get_world_size() - 1:
            hold(self.folder)
        return value


def held_model(folder, *, compiling=False):
    """Layers, of which the last waits in evaluations, or the first in its compilation, once that is told."""
    if compiling:
        from torch._dynamo.callback import callback_handler

        tell_compilations()
        callback_handler.register_start_callback(lambda _: hold(folder))
    return Model.from_layers(
        [nn.Linear(4, 4), nn.Identity() if compiling else Held(folder)],
        loss=nn.functional.mse_loss,
        batch=lambda seed, step, size: (torch.ones(size, 4), torch.zeros(size, 4)),
    )


def hold(folder):
    """Wait until the test has seen what it waits for."""
    while not Path(folder, "open").exists():
        time.sleep(0.1)


def held(event, step, values, folder):
    hold(folder)


IN = {"folder": "FOLDER"}
"""Arguments; the test has its own folder."""

# The longer limit is of any work, the start of the ranks too.
OVERDUE = {
    "as long as any work": (
        {"callback": {"name": f"{__name__}:held", "args": IN}, "training": {"commTimeoutSeconds": 15}},
        "training.commTimeoutSeconds (15)",
        f"callback.name {__name__}:held",
    ),
    "a callback": (
        {"callback": {"name": f"{__name__}:held", "args": IN, "timeoutSeconds": 5}},
        "callback.timeoutSeconds (5)",
        f"callback.name {__name__}:held",
    ),
    "an evaluation": (
        {
            "model": {"name": f"{__name__}:held_model", "args": IN},
            "evaluation": {"everySteps": 1, "batches": 1, "timeoutSeconds": 5},
        },
        "evaluation.timeoutSeconds (5)",
        "an evaluation's forward of layer 1",
    ),
    "an evaluation, whose weights are gathered": (
        {
            "model": {"name": f"{__name__}:held_model", "args": IN},
            "evaluation": {"everySteps": 1, "batches": 1, "timeoutSeconds": 5},
            "parallelism": {"data": 2, "zeroStage": 3},
        },
        "evaluation.timeoutSeconds (5)",
        "an evaluation's forward of layer 1",
    ),
    "a compilation": (
        {
            "model": {"name": f"{__name__}:held_model", "args": {**IN, "compiling": True}},
            "training": {"compile": True, "compileTimeoutSeconds": 5},
        },
        "training.compileTimeoutSeconds (5)",
        "a compilation in the forward of layer 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "limit", "work"), OVERDUE.values(), ids=OVERDUE)
def test_work_that_takes_longer_than_ranks_wait_is_named(gang, small_config, tmp_path, fields, limit, work):
    """By the rank that waited: who, what and which setting; the stack of the one that is busy is printed."""
    fields = json.loads(json.dumps(fields).replace("FOLDER", str(tmp_path)))
    running = gang(small_config(totalSteps=3, **fields), ranks=2)
    busy, waits = ("rank-1", "rank-0") if "layer 1" in work else ("rank-0", "rank-1")
    assert running.exit_code(waits) == ExitCode.PEER_LOST
    (tmp_path / "open").touch()
    said = running.errors()
    assert re.search(rf"{busy}\S* is busy with {re.escape(work)} for \d+ s", said)
    assert f"the others wait no longer than {limit}. To fix: " in said
    assert re.search(r"test_callback.py\", line \d+ in hold", said)


@pytest.mark.slow
def test_a_callback_may_take_longer_than_other_work(gang, small_config, tmp_path):
    """Where its own limit is longer: told of after a fourth of it, and the steps that follow are trained."""
    fields = {
        "callback": {"name": f"{__name__}:held", "args": {"folder": str(tmp_path)}, "timeoutSeconds": 64},
        "training": {"commTimeoutSeconds": 15},
    }
    running = gang(small_config(totalSteps=2, **fields), ranks=2)
    eventually(lambda: "(callback.timeoutSeconds: 64)" in running.errors(), "the callback is told of")
    (tmp_path / "open").touch()
    assert set(running.exit_codes().values()) == {0}
