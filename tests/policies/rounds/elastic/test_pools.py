"""Which pool elastic gangs run in: by the sizes that they reach there, and what a restart costs."""

from collections import Counter

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, RoundSettings, RoundState

from tests.policies.rounds.elastic.gangs import CONCAVE


def gang(slow=0.5, sizes=range(2, 9), *, speeds=CONCAVE, **options):
    """A gang that runs on k80 at ``slow`` times the speed that it has on v100."""
    return ElasticGang(
        speeds={
            "v100": {size: speeds[size] for size in sizes},
            "k80": {size: speeds[size] * slow for size in sizes},
        },
        **options,
    )


def job(name, elastic, **fields):
    by_type = elastic[name].speeds
    least = min(by_type["v100"])
    rates = {kind: by_size[least] for kind, by_size in by_type.items()}
    return Job(name=name, gpus=least, throughput=rates, **{"steps_remaining": 1e5, **fields})


def pools(v100, k80):
    return [
        Node(name="fast", pool="fast", gpu_type="v100", gpus=v100),
        Node(name="slow", pool="slow", gpu_type="k80", gpus=k80),
    ]


def on(pool, gpus):
    return Placement(gpu_type={"fast": "v100", "slow": "k80"}[pool], pool=pool, nodes=(pool,) * gpus)


def decide(
    elastic, nodes, *, shares=None, running=None, since=0.0, surplus=Surplus.LEVEL, fields=None, **settings
):
    running, fields = running or {}, fields or {}
    return decide_round(
        Question(
            now=600.0,
            shares=shares or {name: {"v100": 1.0} for name in elastic},
            jobs=[job(name, elastic, **fields.get(name, {})) for name in elastic],
            nodes=nodes,
            state=RoundState(running=running, running_since=dict.fromkeys(running, since)),
            settings=RoundSettings(round_seconds=360.0, **settings),
            elastic=elastic,
            surplus=surplus,
        )
    )


def sizes_of(decided):
    return {name: (at.pool, len(at.nodes)) for name, at in decided.placements.items()}


def test_a_gang_starts_where_the_size_that_it_reaches_is_fastest():
    """Beside two others on eight fast GPUs it would have two or three; eight slower ones are faster."""
    elastic = {name: gang(0.7) for name in ("x", "y", "z")}
    running = {"x": on("fast", 4), "y": on("fast", 4)}
    decided = decide(elastic, pools(8, 8), running=running)
    assert sizes_of(decided) == {"x": ("fast", 4), "y": ("fast", 4), "z": ("slow", 8)}
    assert decided.started == ("z",) and not decided.resized and not decided.moved
    assert "in pool slow: with the sizes that gangs reach" in decided.reasons["z"]


def test_a_gang_starts_on_its_part_of_the_fast_gpus_where_that_is_faster():
    """Four slow ones are worth less than its third of the fast ones."""
    elastic = {name: gang(0.3) for name in ("x", "y", "z")}
    running = {"x": on("fast", 4), "y": on("fast", 4)}
    found = sizes_of(decide(elastic, pools(8, 4), running=running))
    assert {pool for pool, _ in found.values()} == {"fast"}
    assert sum(size for _, size in found.values()) == 8


def test_a_running_gang_moves_to_idle_gpus_where_it_is_faster_by_more_than_its_restart():
    """Two share four fast GPUs; eight others, nearly as fast, come free."""
    elastic = {"x": gang(0.9), "y": gang(0.9)}
    running = {"x": on("fast", 2), "y": on("fast", 2)}
    decided = decide(elastic, pools(4, 8), running=running)
    assert sorted(sizes_of(decided).values()) == [("fast", 4), ("slow", 8)]
    assert len(decided.moved) == 1
    again = decide(elastic, pools(4, 8), running=decided.placements)
    assert sizes_of(again) == sizes_of(decided) and not again.moved


def beside_a_young_gang(elastic, shares, running, **rigid):
    """A round of an elastic gang and ``rigid`` ones, by their GPUs, beside one that began 5 s before it."""
    jobs = [
        Job(name=name, gpus=gpus, throughput={"v100": 1.0}) for name, gpus in {"young": 2, **rigid}.items()
    ]
    return decide_round(
        Question(
            now=600.0,
            shares=shares,
            jobs=[job("x", elastic), *jobs],
            nodes=pools(4, 8),
            state=RoundState(
                running={**running, "young": on("fast", 2)}, running_since={"x": 0.0, "young": 595.0}
            ),
            settings=RoundSettings(min_run_seconds=60.0),
            elastic=elastic,
        )
    )


@pytest.mark.parametrize(("of_large", "starts"), [(0.1, "small"), (2.0, None)])
def test_what_a_gang_leaves_is_for_those_that_wait_unless_it_is_kept_for_one(of_large, starts):
    """It goes to eight GPUs; a large gang, if it is urgent, waits for a young one beside it."""
    shares = {"x": 0.5, "young": 0.5, "large": of_large, "small": 0.1}
    decided = beside_a_young_gang(
        {"x": gang(0.9)},
        {name: {"v100": share} for name, share in shares.items()},
        {"x": on("fast", 2)},
        large=4,
        small=1,
    )
    assert sizes_of(decided).items() >= {"x": ("slow", 8), "young": ("fast", 2)}.items()
    assert decided.started == ((starts,) if starts else ())
    assert ("2 of 4 v100 free in pool fast, kept for large" in decided.reasons["small"]) == (not starts)


@pytest.mark.parametrize("runs", [{}, {"x": on("slow", 8)}], ids=["starts", "runs"])
@pytest.mark.parametrize(("of_large", "pool"), [(0.1, "fast"), (2.0, "slow")])
def test_a_gang_does_not_go_where_gpus_are_kept_for_another(of_large, pool, runs):
    """It would be faster there; a large gang, if it is urgent, waits for a young one beside it."""
    shares = {"x": {"k80": 0.5, "v100": 0.1}, "young": {"v100": 0.5}, "large": {"v100": of_large}}
    decided = beside_a_young_gang({"x": gang(0.3)}, shares, runs, large=4)
    assert decided.placements["x"].pool == pool and "large" not in decided.placements


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"within_round": True}, "a round has just begun"),
        ({"min_run_seconds": 700.0}, "they have not run long enough"),
        ({"max_moves_per_hour": 0}, "no more moves this hour"),
        ({"fields": {"x": {"steps_remaining": 90.0}, "y": {"steps_remaining": 90.0}}}, "they end soon"),
        ({"since": 599.0, "gangs": {"restart_seconds": 300.0}}, "a restart takes most of a round"),
        ({"gangs": {"may_move": False}}, "they cannot save now"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_running_gang_does_not_move(options, why):
    """Idle GPUs on which it would be faster are not enough."""
    options = dict(options)
    elastic = dict.fromkeys("xy", gang(0.9, **options.pop("gangs", {})))
    running = {"x": on("fast", 2), "y": on("fast", 2)}
    decided = decide(elastic, pools(4, 8), running=running, **options)
    assert not decided.moved, why


def test_the_longer_a_gang_has_run_undisturbed_the_dearer_a_restart_may_be():
    """Five minutes are too much for a round, and little for a gang that has stayed for an hour."""
    elastic = {name: gang(0.9, restart_seconds=300.0) for name in "xy"}
    running = {"x": on("fast", 2), "y": on("fast", 2)}
    assert not decide(elastic, pools(4, 8), running=running, since=590.0).moved
    assert len(decide(elastic, pools(4, 8), running=running, since=-7200.0).moved) == 1


def test_by_throughput_the_gang_that_loses_least_makes_room_for_the_one_that_gains_most():
    """Two on eight fast GPUs: one of them is as fast on slow ones."""
    elastic = {"x": gang(1.0), "y": gang(0.1)}
    running = {"x": on("fast", 4), "y": on("fast", 4)}
    decided = decide(elastic, pools(8, 4), running=running, surplus=Surplus.THROUGHPUT)
    assert sizes_of(decided) == {"x": ("slow", 4), "y": ("fast", 8)}


def test_by_fairness_no_gang_moves_to_where_the_worst_off_would_be_worse_off():
    """The fast GPUs that one leaves are worth more to the other than it loses; by throughput it goes."""
    elastic = {"x": gang(0.7), "y": gang(0.3)}
    running = {"x": on("fast", 4), "y": on("fast", 4)}
    decided = decide(elastic, pools(10, 10), running=running)
    assert sizes_of(decided) == {"x": ("fast", 5), "y": ("fast", 5)}
    decided = decide(elastic, pools(10, 10), running=running, surplus=Surplus.THROUGHPUT)
    assert sizes_of(decided) == {"x": ("slow", 8), "y": ("fast", 8)}


def test_by_cost_a_gang_moves_only_for_its_deadline():
    """Without one it stays where it is cheapest."""
    elastic = {"x": gang(0.9), "y": gang(0.9)}
    running = {"x": on("fast", 2), "y": on("fast", 2)}
    still = decide(elastic, pools(4, 8), running=running, surplus=Surplus.COST)
    assert not still.moved
    late = {"x": {"steps_remaining": 1e4, "deadline": 4000.0}}
    moved = decide(elastic, pools(4, 8), running=running, surplus=Surplus.COST, fields=late)
    assert moved.moved == ("x",) and sizes_of(moved)["x"][0] == "slow"


def test_jobs_whose_shares_are_turns_take_turns_where_one_pool_is_far_slower():
    """Three on GPUs for two and slow ones for one: none has the slow ones for good."""
    elastic = {name: gang(0.1, restart_seconds=10.0) for name in ("x", "y", "z")}
    shares = {name: {"v100": 2 / 3, "k80": 1 / 3} for name in elastic}
    received = {name: Counter() for name in elastic}
    running, since = {}, {}
    now = 0.0
    for _ in range(30):
        decided = decide_round(
            Question(
                now=now,
                shares=shares,
                jobs=[job(name, elastic) for name in elastic],
                nodes=pools(4, 2),
                state=RoundState(
                    running=running, running_since=since, received={n: dict(r) for n, r in received.items()}
                ),
                settings=RoundSettings(round_seconds=60.0),
                elastic=elastic,
            )
        )
        since = {
            name: since.get(name, now) if name not in (*decided.moved, *decided.started) else now
            for name in decided.placements
        }
        running = dict(decided.placements)
        for name, at in running.items():
            received[name][at.gpu_type] += 60.0
        now += 60.0
    assert all(row["v100"] >= 10 * 60.0 for row in received.values())


def test_a_gang_that_cannot_shrink_now_is_not_moved_to_a_type_that_its_size_is_none_of():
    """Its share is there; it follows once it can take a size of that type."""
    speeds = {"v100": {2: 1.0, 3: 1.4}, "k80": {2: 2.0, 4: 3.0}}
    for may_shrink, found in ((False, ("fast", 3)), (True, ("slow", 4))):
        elastic = {"x": ElasticGang(speeds=speeds, may_shrink=may_shrink, restart_seconds=1.0)}
        shares = {"x": {"k80": 1.0}}
        decided = decide(elastic, pools(3, 4), shares=shares, running={"x": on("fast", 3)})
        assert sizes_of(decided) == {"x": found}


def test_a_size_that_skips_one_that_is_no_faster_is_given_up_where_it_finds_no_room():
    """Four GPUs are as fast as two, and for six there is one too few: it has what it can use."""
    elastic = {"x": gang(sizes=(2, 4, 6), speeds={2: 1.0, 4: 1.0, 6: 2.0})}
    decided = decide(elastic, pools(5, 0), running={"x": on("fast", 4)})
    assert sizes_of(decided) == {"x": ("fast", 4)}
