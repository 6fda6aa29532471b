"""A gang tries the candidates of its plan in its first steps, and the measured fastest goes on."""

import pytest
import torch
from ballast_policies.contract.messages import Candidate, Report
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.support.plans import local_plan
from tests.trainer.models import picky_model

pytestmark = pytest.mark.processes

CANDIDATES = (
    Candidate(schedule="1F1B", layers=(4, 4), step_seconds=0.25),
    Candidate(schedule="ZeroBubbleV", layers=(1, 3, 2, 2), step_seconds=0.125),
    Candidate(schedule="1F1B", layers=(4, 5), step_seconds=0.25),
    Candidate(schedule="InterleavedZeroBubble", layers=(2, 2, 2, 2), step_seconds=0.25),
    Candidate(schedule="ZeroBubbleH1", layers=(1, 7), repeated=2, step_seconds=0.25),
    Candidate(schedule="ZeroBubbleH1", layers=(1, 7), repeated=0, step_seconds=0.25),
)


def trained(pods, folder, config, candidates, network):
    """Losses of two pods, and the last report."""
    names = [f"job-{network}-{number}" for number in range(2)]
    plan = local_plan(names, network=network).replace(candidates=candidates)
    pods.start_job(folder, config, plan)
    assert {pods.exit_code(name) for name in names} == {0}, pods.errors()
    return pods.losses(names[0]), Report.from_json((folder / "report.json").read_text()), names[0]


def test_candidates_are_tried_and_the_fastest_goes_on(pods, small_config, tmp_path):
    """Each has five steps, one that cannot run is said why; losses are to the bit those without."""
    config = small_config(totalSteps=28, rebalance={"enabled": True, "everySteps": 4, "minGain": 0.0})
    losses, report, first = trained(pods, tmp_path / "tried", config, CANDIDATES, 91)
    (event,) = pods.events("tried", first)
    measured = [one["measured_seconds"] for one in event["candidates"]]
    assert event["step"] == 25
    assert [seconds is None for seconds in measured] == [False, False, True, False, False, False]
    assert [one["repeated"] for one in event["candidates"]] == [None] * 4 + [2, 0]
    assert "2 stages of 9 layers, not 2 of 8" in event["candidates"][2]["reason"]
    assert event["kept"] == min((s, n) for n, s in enumerate(measured) if s is not None)[1] == report.kept
    assert [one.step_seconds for one in report.tried] == measured
    sizes = [
        tuple(stage["endLayer"] - stage["firstLayer"] for stage in line["stages"])
        for line in pods.lines(first)
        if "event" not in line
    ]
    run = [one.layers for one in (*CANDIDATES[:2], *CANDIDATES[3:]) for _ in range(5)]
    assert sizes[:26] == [*run, CANDIDATES[report.kept].layers]
    assert all(event["step"] >= 25 for event in pods.events("rebalance", first))
    plain, untried, _ = trained(pods, tmp_path / "plain", config | {"rebalance": {"enabled": False}}, (), 92)
    assert losses == plain
    assert (untried.tried, untried.kept) == ((), None)


def test_a_job_whose_steps_are_done_tries_nothing(pods, small_config, tmp_path):
    """No step is left whose data a trial could read; nor are results told that an earlier launch had."""
    config = small_config(
        totalSteps=2,
        training={"dataloaderNumWorkers": 1},
        checkpoint={"path": str(tmp_path / "saved"), "everySteps": 2},
    )
    trained(pods, tmp_path / "steps", config, (), 94)
    _, report, first = trained(pods, tmp_path / "none", config, CANDIDATES[1::-1], 95)
    assert not pods.events("migrate", first)
    assert (report.step, report.tried) == (2, ())


class OneBackward(nn.Module):
    """A layer whose backward runs once: not in two halves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(picky_model.WIDTH, picky_model.WIDTH)

    def forward(self, values):
        result, calls = self.linear(values), []

        def once(gradient):
            if calls:
                raise RuntimeError("a second backward")
            calls.append(gradient)

        if result.requires_grad:
            result.register_hook(once)
        return torch.tanh(result)


def with_one_backward():
    return Model(layer_count=8, build_layer=lambda index: OneBackward(), loss=nn.functional.mse_loss)


def test_a_schedule_that_the_layers_do_not_stand_is_not_trained_by(pods, small_config, tmp_path):
    """Its stages have run before, under a schedule that does not split their backward."""
    config = small_config(
        totalSteps=12,
        model={"name": "tests.trainer.loop.test_candidates:with_one_backward"},
        data={"name": "tests.trainer.models.picky_model:batches"},
    )
    plans = tuple(
        Candidate(schedule=name, layers=(4, 4), step_seconds=1.0) for name in ("1F1B", "ZeroBubbleH1")
    )
    _, report, _ = trained(pods, tmp_path, config, plans, 93)
    assert report.kept == 0 and "a second backward" in report.tried[1].reason
