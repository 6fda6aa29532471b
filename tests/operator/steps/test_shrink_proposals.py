"""Which proposals of a trainer are accepted, from values alone."""

import dataclasses

import pytest
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import ReconcileContext
from ballast_operator.steps.shrinking import refusal
from ballast_policies.contract import Proposal, Stage

from tests.operator.views.builders import NOW, a_plan, a_spec, a_view

PODS = ("job-1-0", "job-1-1", "job-1-2", "job-1-3")
GOOD = Proposal(
    epoch=1,
    step=40,
    kept_pods=PODS[:2],
    released_pods=PODS[2:],
    stages=(Stage(rank=0, first_layer=0, end_layer=3), Stage(rank=1, first_layer=3, end_layer=8)),
    step_seconds_before=1.0,
    step_seconds_after=1.05,
)


def context(**spec) -> ReconcileContext:
    view = a_view(pods=PODS, plan=a_plan(PODS), spec=a_spec(**spec))
    return ReconcileContext(
        view=view, spec=view.spec, assignment=None, shortage="", now=NOW, settings=JobSettings()
    )


CASES = {
    "as it should be": ({}, {}, ""),
    "repacking is not wanted": ({"repack_enabled": False}, {}, "spec.repack.enabled is false"),
    "too few stay": ({"repack_min_stages": 3}, {}, "keeps 2 pods, spec.repack.minStages is 3"),
    "as many stay as are wanted": ({"repack_target_stages": 2}, {}, ""),
    "others stay than are wanted": (
        {"repack_target_stages": 3},
        {},
        "keeps 2 pods, spec.repack.targetStages is 3",
    ),
    "it would be too slow": ({}, {"step_seconds_after": 1.2}, "spec.repack.maxSlowdown 0.1 allows 1.1 s"),
    "rank 0 would go": (
        {},
        {"kept_pods": (PODS[1], PODS[0])},
        "rank 0 has to stay job-1-0, it names job-1-1",
    ),
    "a pod is forgotten": ({}, {"released_pods": (PODS[2],)}, "the plan's pods are"),
    "a stranger is named": ({}, {"released_pods": (PODS[2], "other-1-0")}, "other-1-0"),
    "a stage on a rank that goes": (
        {},
        {"stages": (Stage(rank=2, first_layer=0, end_layer=8),)},
        "a stage is on rank 2, but it keeps 2 pods",
    ),
}


@pytest.mark.parametrize(("spec", "changes", "want_words"), CASES.values(), ids=CASES.keys())
def test_a_proposal_is_checked_against_the_spec_and_the_plan(spec, changes, want_words):
    """The refusal has the numbers; an empty one accepts."""
    said = refusal(context(**spec), dataclasses.replace(GOOD, **changes))
    assert want_words in said if want_words else said == ""
