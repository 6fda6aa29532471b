"""One plan follows another: shrink, grow and stop, as the operator and the trainer both compute them."""

import pytest
from ballast_policies.contract.messages import Proposal, Rank, Stage
from ballast_policies.contract.plan import Directive, Plan

PODS = ("job-1-0", "job-1-1", "job-1-2", "job-1-3")
PLAN = Plan(
    job="job",
    epoch=3,
    launch=1,
    directive=Directive.RUN,
    ranks=tuple(Rank(rank=i, pod=p, address=f"10.0.0.{i}", gpu_type="v100") for i, p in enumerate(PODS)),
    stages=tuple(Stage(rank=i, first_layer=2 * i, end_layer=2 * i + 2) for i in range(4)),
    reason="launch 1",
)
PROPOSAL = Proposal(
    epoch=3,
    step=40,
    kept_pods=(PODS[0], PODS[3]),
    released_pods=(PODS[1], PODS[2]),
    stages=(Stage(rank=0, first_layer=0, end_layer=3), Stage(rank=1, first_layer=3, end_layer=8)),
    step_seconds_before=1.0,
    step_seconds_after=1.05,
    reason="2 ranks are enough",
)


def test_shrink_keeps_pods_and_addresses_and_renumbers_the_ranks():
    """Kept pods in the proposal's order, the proposal's stages and reason, one epoch more."""
    shrunk = PLAN.shrink(PROPOSAL)
    assert (shrunk.job, shrunk.epoch, shrunk.launch, shrunk.directive) == ("job", 4, 1, Directive.SHRINK)
    assert [(rank.rank, rank.pod, rank.address) for rank in shrunk.ranks] == [
        (0, PODS[0], "10.0.0.0"),
        (1, PODS[3], "10.0.0.3"),
    ]
    assert (shrunk.stages, shrunk.reason) == (PROPOSAL.stages, PROPOSAL.reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 2}, "of epoch 2, the plan of epoch 3"),
        ({"released_pods": ("other-1-0",)}, r"names \['other-1-0'\]"),
        ({"stages": (Stage(rank=2, first_layer=0, end_layer=8),)}, "the plan has 2 ranks"),
    ],
)
def test_a_proposal_that_does_not_fit_the_plan_is_refused(changes, reason):
    """An old proposal, an unknown pod and a stage on a released rank never become a plan."""
    with pytest.raises(ValueError, match=reason):
        PLAN.shrink(PROPOSAL.replace(**changes))


WHOLE = Plan(
    job="job",
    epoch=1,
    launch=1,
    directive=Directive.RUN,
    ranks=tuple(
        Rank(rank=i, pod=PODS[i // 2], local_rank=i % 2, address=f"10.0.0.{i // 2}", gpu_type="v100")
        for i in range(6)
    ),
)


def test_a_shrink_of_pods_with_several_ranks_keeps_whole_pods():
    """All ranks of a kept pod stay, numbered one after the other; those of the others leave."""
    proposal = PROPOSAL.replace(epoch=1, kept_pods=(PODS[0], PODS[2]), released_pods=(PODS[1],), stages=())
    shrunk = WHOLE.shrink(proposal)
    assert [(rank.rank, rank.process) for rank in shrunk.ranks] == [
        (0, "job-1-0"),
        (1, "job-1-0/1"),
        (2, "job-1-2"),
        (3, "job-1-2/1"),
    ]
    assert shrunk.pods == (PODS[0], PODS[2])
    assert [shrunk.rank_of(name) for name in ("job-1-2", "job-1-2/1", "job-1-1", "job-1-1/1")] == [
        2,
        3,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "places",
    [
        [("a", 0), ("a", 0)],
        [("a", 1), ("a", 0)],
        [("a", 1)],
        [("a", 0), ("b", 0), ("a", 1)],
        [("a", 0), ("a", 2)],
    ],
)
def test_ranks_of_a_pod_that_do_not_follow_each_other_are_refused(places):
    """Neighbours in a tensor group are neighbours in a pod: nothing may rely on it where it is not so."""
    ranks = tuple(
        Rank(rank=i, pod=pod, local_rank=local, address="10.0.0.1", gpu_type="v100")
        for i, (pod, local) in enumerate(places)
    )
    with pytest.raises(ValueError, match="follow each other"):
        WHOLE.replace(ranks=ranks)


def test_grow_adds_ranks_and_leaves_the_stages_to_the_trainer():
    """The trainer knows what its layers cost now."""
    new = Rank(rank=4, pod="job-1-4", address="10.0.0.4", gpu_type="v100")
    grown = PLAN.grow([new], "idle GPUs")
    assert grown.ranks == (*PLAN.ranks, new)
    assert (grown.epoch, grown.directive, grown.stages) == (4, Directive.GROW, ())
    assert grown.reason == "idle GPUs"


@pytest.mark.parametrize(
    "new",
    [
        (),
        (Rank(rank=5, pod="job-1-5", address="", gpu_type="v100"),),
        (Rank(rank=4, pod=PODS[1], address="", gpu_type="v100"),),
    ],
    ids=["none", "a gap in the numbers", "a pod that is in the plan"],
)
def test_ranks_that_do_not_follow_the_plan_cannot_join(new):
    """Ranks stay 0 to n - 1, each with a pod of its own."""
    with pytest.raises(ValueError, match=r"at least one|0\.\.n-1|follow each other"):
        PLAN.grow(new, "")


def test_stop_keeps_the_ranks():
    """All ranks of the plan save and exit."""
    stopped = PLAN.stop("preempted")
    assert stopped == PLAN.replace(epoch=4, directive=Directive.CHECKPOINT_AND_STOP, reason="preempted")


def test_the_operator_may_ask_for_a_shrink_and_leaves_the_stages_to_the_trainer():
    """The lowest ranks first, as rank 0's pod may be lost; not all pods, and none of another plan."""
    kept = PLAN.keep((PODS[0], PODS[2]), "another job waits")
    assert (kept.epoch, kept.directive, kept.stages, kept.reason) == (
        4,
        Directive.SHRINK,
        (),
        "another job waits",
    )
    assert [(rank.rank, rank.pod) for rank in kept.ranks] == [(0, PODS[0]), (1, PODS[2])]
    assert [rank.pod for rank in PLAN.keep(PODS[1:], "it is lost").ranks] == list(PODS[1:])
    for pods in ((), PODS, (PODS[1], PODS[0]), (PODS[0], "other-1-0"), (PODS[0], PODS[0])):
        with pytest.raises(ValueError, match=r"lowest ranks first|are to stay"):
            PLAN.keep(pods, "")
