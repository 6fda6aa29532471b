"""Rounds with gangs in several pools, on random clusters and on some that were worked out by hand."""

import dataclasses

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.planning.launch import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.gangs import ElasticGang, MixedGang
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, PoolPart, RoundSettings, RoundState

FORM = PipelineForm(schedule="1F1B", positions=1, microbatches=8)
PIPELINE = LaunchedPipeline(layers=MeasuredLayers(), count=16, form=FORM)
SPEEDS = {"fast": 4.0, "slow": 2.0}


def a_gang(size, **changes):
    values = {"sizes": (size,), "speeds": SPEEDS, "base": size, "fits_one_pool": False, **changes}
    return MixedGang(pipeline=PIPELINE, **values)


def a_job(name, gpus, *types):
    return Job(name=name, gpus=gpus, throughput={kind: SPEEDS[kind] for kind in types or SPEEDS})


def nodes(**gpus):
    return [Node(name=f"{pool}-0", pool=pool, gpu_type=pool, gpus=count) for pool, count in gpus.items()]


def asked(jobs, cluster, mixed, *, shares=None, running=None, since=None, received=None, **settings):
    return Question(
        now=1000.0,
        shares=shares or {job.name: {"fast": 0.5, "slow": 0.5} for job in jobs},
        jobs=jobs,
        nodes=cluster,
        state=RoundState(running=running or {}, running_since=since or {}, received=received or {}),
        settings=RoundSettings(**settings),
        elastic={},
        mixed=mixed,
    )


def both(fast=2, slow=2):
    parts = (
        PoolPart(pool="fast", gpu_type="fast", gpus=fast),
        PoolPart(pool="slow", gpu_type="slow", gpus=slow),
    )
    places = ("fast-0",) * fast + ("slow-0",) * slow
    return Placement(gpu_type="fast", pool="fast", nodes=places, parts=parts)


TWO = nodes(fast=2, slow=2)
WIDE = a_job("wide", 4)


def test_a_more_urgent_gang_takes_both_pools_and_a_less_urgent_one_waits():
    small = [a_job("left", 2, "fast"), a_job("right", 2, "slow")]
    shares = {"wide": {"fast": 0.5, "slow": 0.5}, "left": {"fast": 0.5}, "right": {"slow": 0.5}}
    for had, expected in (
        ({"left": {"fast": 900.0}, "right": {"slow": 900.0}}, {"wide"}),
        ({"wide": {"fast": 900.0}}, {"left", "right"}),
    ):
        question = asked([WIDE, *small], TWO, {"wide": a_gang(4)}, shares=shares, received=had)
        assert set(decide_round(question).placements) == expected


def when_a_job_comes(**more):
    """The question where the wide gang runs in both pools and a job comes for two fast GPUs."""
    jobs = [WIDE, a_job("new", 2)]
    fields = {"shares": {"new": {"fast": 1.0}}, **more}
    return asked(jobs, TWO, {"wide": a_gang(4)}, running={"wide": both()}, since={"wide": 0.0}, **fields)


def test_within_a_round_it_keeps_them_whatever_job_comes():
    decided = decide_round(when_a_job_comes(within_round=True))
    assert (decided.extended, decided.waiting) == (("wide",), ("new",))


def test_at_the_end_of_the_round_it_is_stopped_for_a_more_urgent_job():
    question = when_a_job_comes(
        shares={"new": {"fast": 1.0}, "wide": {"fast": 0.1}},
        received={"wide": {"fast": 900.0}},
    )
    decided = decide_round(question)
    assert (decided.started, decided.stopped) == (("new",), ("wide",))


def test_it_is_not_stopped_where_the_moves_of_the_hour_are_used_up():
    assert decide_round(when_a_job_comes(max_moves_per_hour=0)).extended == ("wide",)


@pytest.mark.parametrize("late", [{}, {"late": a_gang(2, fits_one_pool=True)}], ids=["one pool", "several"])
def test_a_young_gang_is_not_stopped_for_it_and_what_is_free_is_kept(late):
    """The fast pool's gang must not be disturbed; the slow pool stays free for the wide gang."""
    jobs = [WIDE, a_job("young", 2, "fast"), a_job("late", 2, "slow")]
    beside = Node(name="beside", pool="beside", gpu_type="slow", gpus=1)
    young = Placement(gpu_type="fast", pool="fast", nodes=("fast-0",) * 2)
    question = asked(
        jobs,
        [*TWO, beside],
        {"wide": a_gang(4), **late},
        running={"young": young},
        since={"young": 990.0},
        min_run_seconds=100.0,
        shares={"wide": {"fast": 1.0}, "young": {"fast": 0.1}, "late": {"slow": 0.1}},
    )
    decided = decide_round(question)
    assert set(decided.placements) == {"young"}


def test_it_takes_what_an_elastic_gang_has_beyond_its_least_size():
    """Everyone's least size comes before another's extra GPUs."""
    elastic = ElasticGang(speeds={"fast": {1: 1.0, 3: 3.0}})
    grown = Placement(gpu_type="fast", pool="fast", nodes=("fast-0",) * 3)
    question = Question(
        now=1000.0,
        shares={"grown": {"fast": 1.0}, "wide": {"slow": 0.01}},
        jobs=[Job(name="grown", gpus=1, throughput={"fast": 4.0}), WIDE],
        nodes=nodes(fast=3, slow=2),
        state=RoundState(running={"grown": grown}, running_since={"grown": 0.0}),
        settings=RoundSettings(),
        elastic={"grown": elastic},
        mixed={"wide": a_gang(4)},
    )
    decided = decide_round(question)
    assert set(decided.placements["wide"].parts) == set(both().parts)
    assert decided.placements["grown"].nodes == ("fast-0",)


TO_COME = Node(name="slow/new-0", pool="slow", gpu_type="slow", gpus=2, provisionable=True)


def test_nodes_that_do_not_exist_yet_hold_a_part_where_those_that_do_have_no_room():
    decided = decide_round(asked([WIDE], [*nodes(fast=2), TO_COME], {"wide": a_gang(4)}))
    placed = decided.placements["wide"]
    assert set(placed.parts) == set(both().parts)
    assert sorted(placed.nodes) == ["fast-0", "fast-0", "slow/new-0", "slow/new-0"]
    decided = decide_round(asked([WIDE], [*TWO, TO_COME], {"wide": a_gang(4)}))
    assert sorted(decided.placements["wide"].nodes) == ["fast-0", "fast-0", "slow-0", "slow-0"]


def test_a_node_to_come_is_asked_for_before_another_gang_is_stopped():
    other = a_job("other", 2, "slow")
    at = Placement(gpu_type="slow", pool="slow", nodes=("slow-0",) * 2)
    shares = {"wide": {"fast": 0.5, "slow": 0.5}, "other": {"slow": 0.1}}
    had = {"other": {"slow": 900.0}}
    for cluster, expected in (([*TWO, TO_COME], {"wide", "other"}), (TWO, {"wide"})):
        question = asked(
            [WIDE, other],
            cluster,
            {"wide": a_gang(4)},
            shares=shares,
            received=had,
            running={"other": at},
            since={"other": 0.0},
        )
        assert set(decide_round(question).placements) == expected


def test_a_gang_that_runs_is_not_moved_onto_nodes_that_do_not_exist_yet():
    """Four on the two that it has and two to come would be faster; it would wait for minutes."""
    now = Placement(gpu_type="fast", pool="fast", nodes=("fast-0",) * 2)
    gang = a_gang(2, sizes=(2, 4), fits_one_pool=True, may_move=True)
    cluster, running = [*nodes(fast=2), TO_COME], {"wide": now}
    question = asked([a_job("wide", 2)], cluster, {"wide": gang}, running=running, since={"wide": 0.0})
    assert decide_round(question).placements["wide"] == now


@pytest.mark.parametrize("least_run", [0.0, 100.0])
def test_a_young_gang_is_not_moved_to_where_it_would_be_faster(least_run):
    now = Placement(gpu_type="fast", pool="fast", nodes=("fast-0",) * 2)
    gang = a_gang(2, sizes=(2, 4), fits_one_pool=True, may_move=True, restart_seconds=1.0)
    running, since = {"wide": now}, {"wide": 990.0}
    question = asked(
        [a_job("wide", 2)], TWO, {"wide": gang}, running=running, since=since, min_run_seconds=least_run
    )
    assert (decide_round(question).placements["wide"] == now) == bool(least_run)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("surplus", [Surplus.LEVEL, Surplus.COMPLETION_TIME])
@pytest.mark.parametrize(
    ("job", "cluster"),
    [(WIDE, nodes(fast=2)), (WIDE, nodes(fast=0, slow=2)), (a_job("wide", 4, "fast"), TWO)],
    ids=["its node is gone", "its GPUs are gone", "it may use one type no longer"],
)
def test_a_gang_that_could_not_be_started_where_it_is_does_not_stay(job, cluster, surplus, mixes):
    """Nor one that may be in one pool only since then; it is told what it waits for."""
    gang = a_gang(4, speeds={kind: SPEEDS[kind] for kind in job.throughput})
    question = asked(
        [job], cluster, {"wide": gang} if mixes else {}, running={"wide": both()}, since={"wide": 0.0}
    )
    decided = decide_round(dataclasses.replace(question, surplus=surplus))
    assert decided.stopped == ("wide",)
    assert decided.reasons["wide"].startswith(f"waits for 4 GPUs of {'its pools' if mixes else 'one pool'}")


def elastic(size=2, most=6, **changes):
    values = {"may_shrink": True, "may_grow": True, "fits_one_pool": True, **changes}
    return a_gang(size, sizes=tuple(range(size, most + 1)), **values)


def grown_question(jobs, gang, cluster, held, **fields):
    """The wide gang holds ``held`` in both pools, and ``jobs`` want GPUs."""
    wide = a_job("wide", len(held.nodes))
    return asked(
        [wide, *jobs], cluster, {"wide": gang}, running={"wide": held}, since={"wide": 0.0}, **fields
    )


@pytest.mark.parametrize("settings", [{"within_round": True}, {"min_run_seconds": 9999.0}])
def test_it_gives_back_live_what_a_waiting_job_needs_and_no_more(settings):
    """Its last ranks, also while it must not be stopped; where its first ranks are, others wait."""
    for kind, gpus, left in (("slow", 1, 4), ("slow", 3, 2), ("fast", 1, 5)):
        jobs = [a_job("new", gpus, kind)]
        question = grown_question(jobs, elastic(), nodes(fast=2, slow=3), both(2, 3), **settings)
        decided, resized = decide_round(question), ("wide",) if left < 5 else ()
        assert (decided.started, decided.resized) == (("new",) if resized else (), resized)
        assert decided.placements["wide"].nodes == both(2, left - 2).nodes
        assert decided.placements["wide"].parts == (() if left == 2 else both(2, left - 2).parts)
        assert ("new can run on what it gives back" in decided.reasons["wide"]) == bool(resized)


def test_it_goes_on_with_its_first_ranks_where_the_pool_of_its_last_is_gone():
    question = grown_question([], elastic(), nodes(fast=2), both(2, 2))
    assert decide_round(question).placements["wide"].nodes == both(2, 0).nodes


def test_at_the_end_of_a_round_it_gives_back_to_one_that_is_more_urgent():
    """In place of a restart."""
    jobs = [a_job("new", 3, "slow")]
    question = grown_question(
        jobs, elastic(), nodes(fast=2, slow=3), both(2, 3), shares={"new": {"slow": 1.0}}
    )
    decided = decide_round(question)
    assert (decided.started, decided.resized, decided.moved) == (("new",), ("wide",), ())
    assert decided.placements["wide"] == Placement(gpu_type="fast", pool="fast", nodes=("fast-0",) * 2)


def test_a_gang_that_waits_for_one_pool_starts_in_two_on_what_another_gives_back():
    """One GPU of each pool."""
    cluster = [*nodes(fast=2, slow=3), Node(name="more-0", pool="more", gpu_type="slow", gpus=1)]
    question = grown_question([a_job("new", 2, "slow")], elastic(4), cluster, both(2, 3), within_round=True)
    decided = decide_round(dataclasses.replace(question, mixed={**question.mixed, "new": elastic(2, 2)}))
    assert sorted(decided.placements["new"].nodes) == ["more-0", "slow-0"]
    assert decided.resized == ("wide",)


@pytest.mark.parametrize(
    "gang", [elastic(may_shrink=False), elastic(planned={(("fast", 2), ("slow", 3)): None}), elastic(5)]
)
def test_it_keeps_what_it_cannot_give_back_live(gang):
    question = grown_question(
        [a_job("new", 1, "slow")], gang, nodes(fast=2, slow=3), both(2, 3), within_round=True
    )
    assert decide_round(question).extended == ("wide",)


def test_it_grows_live_in_the_pool_of_its_last_ranks():
    """Up to its largest size, and the limit of its tenant; more than four slow ones make it no faster."""
    cluster = nodes(fast=4, slow=8)
    for most, room, slow in ((5, {}, 3), (9, {}, 4), (9, {"t": 1}, 3), (9, {"t": 0}, 2)):
        question = grown_question([], elastic(most=most), cluster, both(2, 2), within_round=True)
        decided = decide_round(dataclasses.replace(question, tenants={"wide": "t"}, room=room))
        assert decided.placements["wide"] == dataclasses.replace(
            both(2, slow), nodes=("fast-0",) * 2 + ("slow-0",) * slow
        )
        assert (decided.resized, decided.moved) == (("wide",) if slow > 2 else (), ())
    question = grown_question([], elastic(may_grow=False), cluster, both(2, 2), within_round=True)
    assert decide_round(question).extended == ("wide",)
