"""When a checkpoint is due where ``checkpoint.everySteps`` is not stated."""

import json
import types

import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.prices.hazard import daly_interval
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.layers.precision import LossScale
from ballast_trainer.loop.saving import Saver
from ballast_trainer.loop.state import RunState

MODEL = {"name": "gpt", "layers": 4}


class Stopped(StopSignal):
    """No signal handler."""

    def __init__(self) -> None:
        self.received = False


def saver(tmp_path, *, step_seconds=(), failures=None, schedule="1F1B", rank=0, **checkpoint):
    """A saver of a job that is at step 0, and what it sees of the job."""
    config = JobConfig.from_json(
        json.dumps(
            {
                "totalSteps": 10**6,
                "model": MODEL,
                "pipeline": {"schedule": schedule},
                "checkpoint": {"path": str(tmp_path), "asyncMode": "disabled", **checkpoint},
            }
        )
    )
    plan = types.SimpleNamespace(failures_per_hour=failures, launch=1)
    model = types.SimpleNamespace(
        config=config,
        device=None,
        definition=types.SimpleNamespace(layer_count=4, tied=()),
        world=types.SimpleNamespace(rank=rank, data=Axis()),
        layers=(),
        batches=types.SimpleNamespace(position=lambda step: ""),
    )
    run, told = RunState(plan=plan, loss_scale=LossScale("fp32")), []
    progress = types.SimpleNamespace(
        model=model,
        run=run,
        step_seconds=lambda: step_seconds,
        saved=lambda *figures, **_: told.append(figures),
        event=lambda *_, **__: None,
        channel=None,
    )
    made = Saver(progress, stop=Stopped())
    made._checkpoints.save = lambda *_, **__: None
    return made, run, told


def steps_until_saved(made, run, most=5000):
    """Steps that are trained until a checkpoint is written."""
    first = run.step
    while run.step < first + most:
        wanted = made.wanted()
        run.step += 1
        made.save_if_due(wanted=wanted)
        if run.checkpoint_step == run.step:
            return run.step - first
    return None


def test_a_stated_interval_is_kept(tmp_path):
    """Whatever is known of losses."""
    made, run, _ = saver(tmp_path, step_seconds=(1.0,), failures=9.0, everySteps=30)
    assert [steps_until_saved(made, run) for _ in range(3)] == [30, 30, 30]


@pytest.mark.parametrize("failures", [None, 0.0])
def test_without_losses_it_is_every_hundred_steps(tmp_path, failures):
    """On machines that stay, and away from Kubernetes."""
    made, run, _ = saver(tmp_path, step_seconds=(1.0,), failures=failures)
    assert [steps_until_saved(made, run) for _ in range(3)] == [100, 100, 100]


def test_after_the_first_checkpoint_it_is_dalys_interval(tmp_path):
    """By what this checkpoint took; told with the next report."""
    made, run, told = saver(tmp_path, step_seconds=(2.0, 1.0, 1.0), failures=0.5)
    assert steps_until_saved(made, run) == 100
    made._seconds.clear()
    made._seconds.append(5.0)
    expected = round(daly_interval(5.0, 7200.0))
    assert made.every_steps() == expected == pytest.approx(265, abs=5)
    assert steps_until_saved(made, run) == expected
    assert told[0][1] >= 60  # however little a checkpoint takes, at least a minute


def test_another_rate_counts_from_the_next_step_on(tmp_path):
    """While training, without a restart."""
    made, run, _ = saver(tmp_path, step_seconds=(1.0,), failures=0.1)
    assert steps_until_saved(made, run) == 100
    made._seconds.clear()
    made._seconds.append(5.0)
    seldom = made.every_steps()
    run.plan.failures_per_hour = 10.0
    assert made.every_steps() < seldom / 5


def test_a_change_of_shape_does_not_ask_for_a_checkpoint(tmp_path):
    """No step is measured right after it: the last figure counts."""
    seconds = [(1.0,)]
    made, _, _ = saver(tmp_path, failures=0.5)
    made._progress.step_seconds = lambda: seconds[0]
    made._seconds.append(5.0)
    before = made.every_steps()
    seconds[0] = ()
    assert made.every_steps() == before > 200


def test_a_schedule_without_a_flush_keeps_the_default(tmp_path):
    """Its weights depend on where the pipeline drains, so measured times must not decide it."""
    made, run, _ = saver(tmp_path, step_seconds=(1.0,), failures=9.0, schedule="PipeDream")
    made._seconds.append(5.0)
    assert made.every_steps() == 100
    assert steps_until_saved(made, run) == 100


def test_other_ranks_decide_nothing(tmp_path):
    """They are told with the sum over all ranks."""
    made, run, _ = saver(tmp_path, step_seconds=(1.0,), failures=9.0, rank=1)
    run.step = 10_000
    assert not made.wanted()
