"""The user's callback: what it is told, and what follows where it raises."""

import logging

import pytest
import torch
from ballast_policies.contract.job import CallbackConfig, CallbackError
from ballast_trainer.causes import describe, explains_itself
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.reporting.callback import CallbackFailed, CallingReporter
from ballast_trainer.reporting.console import SilentReporter

from tests.support.one_process import train_here

TOLD = []


def noting(event, step, values, *, label=None):
    TOLD.append((event, step, sorted(values), label))
    torch.rand(3)
    values.clear()


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
        checkpoint={"path": str(tmp_path), "everySteps": 2},
        callback=callback,
    )


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
    assert names["checkpoint"] == ["path", "pause_ms"]
    assert {label for *_, label in TOLD} == {"mine"}
    del config["callback"]
    assert train_here(config | {"checkpoint": {"path": str(tmp_path / "b")}}).losses == told.losses


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
    """Before the first step."""
    with pytest.raises(ConfigurationError, match=r"callback.name: cannot load 'no_such:thing'.*To fix"):
        CallingReporter(SilentReporter(), CallbackConfig(name="no_such:thing"))
