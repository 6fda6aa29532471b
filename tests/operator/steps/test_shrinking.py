"""A repack: which proposals are accepted, and what an accepted one does."""

import dataclasses

import pytest
from ballast_operator.steps.context import refusal
from ballast_operator.steps.decide import take_step
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive, Stage

from tests.operator.steps.contexts import PODS, PROPOSAL, a_context, a_running_view, after, conditions
from tests.operator.views.builders import a_config, a_plan

CASES = {
    "as it should be": ({}, {}, ""),
    "repacking is not wanted": ({"enabled": False}, {}, "spec.repack.enabled is false"),
    "too few stay": ({"minStages": 3}, {}, "keeps 2 pods, below spec.repack.minStages=3"),
    "as many stay as are wanted": ({"targetStages": 2}, {}, ""),
    "others stay than are wanted": (
        {"targetStages": 3},
        {},
        "keeps 2 pods, spec.repack.targetStages=3",
    ),
    "it would be too slow": (
        {},
        {"step_seconds_after": 1.2},
        "above the 1.1 s that spec.repack.maxSlowdown=0.1 allows",
    ),
    "rank 0 would go": (
        {},
        {"kept_pods": (PODS[1], PODS[0])},
        "rank 0 must stay job-1-0, the proposal moves it to job-1-1",
    ),
    "a pod is forgotten": ({}, {"released_pods": (PODS[2],)}, "the plan's pods are"),
    "a stranger is named": ({}, {"released_pods": (PODS[2], "other-1-0")}, "other-1-0"),
    "a stage on a rank that goes": (
        {},
        {"stages": (Stage(rank=2, first_layer=0, end_layer=8),)},
        "a stage is on rank 2, but the proposal keeps 2 ranks",
    ),
}


@pytest.mark.parametrize(("repack", "changes", "want_words"), CASES.values(), ids=CASES.keys())
def test_a_proposal_is_checked_against_the_spec_and_the_plan(repack, changes, want_words):
    """The refusal has the numbers; an empty one accepts."""
    spec = {"config": a_config(repack={"enabled": True, **repack})}
    said = refusal(a_context(spec=spec), PROPOSAL.replace(**changes))
    assert want_words in said if want_words else said == ""


SHRUNK = a_plan(PODS[:2], epoch=2, directive=Directive.SHRINK)


def shrinking(*, acknowledged, released=True):
    lease = LeaseView(ack=Ack(epoch=acknowledged, step=41, pause_ms=12.5), proposal=PROPOSAL)
    view = a_running_view(plan=SHRUNK, lease=lease)
    return view if released else dataclasses.replace(view, pods=view.pods[:2])


def test_a_shrink_is_recorded_when_the_released_pods_are_gone():
    """Survivors with their uids, the pause, and the predicted step times."""
    result = take_step(a_context(shrinking(acknowledged=2, released=False), seconds=5))
    (entry,) = result.status.repacks
    assert [(kept.name, kept.uid) for kept in entry.survivors] == [(pod, f"uid-{pod}") for pod in PODS[:2]]
    assert (entry.epoch, entry.step, entry.pause_ms, entry.time) == (2, 41, 12.5, after(5))
    assert (entry.released_pods, entry.step_seconds_after) == (PODS[2:], 1.05)
    assert (result.status.allocation.pods, result.status.allocation.gpus) == (PODS[:2], 2)
    assert conditions(result)["Repacked"] == (True, "PodsReleased")
