"""Decisions under all that they must weigh: memory, what is balanced, links, noise; and what actions cost."""

import numpy as np
import pytest
from ballast_lab.simulated_steps import fitted_action_seconds, simulated_step_seconds
from ballast_policies.planning.balancers.network import steady_period_seconds
from ballast_policies.planning.balancers.registry import BalancerInput, deepspeed_partition
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.rebalance import MOST, decide_rebalance, least_gain
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples, first_fast

SECONDS = st.lists(st.floats(0.1, 1.0), min_size=6, max_size=14)


def decide(partition, seconds, **changes):
    how = {"min_gain": 0.05, "horizon_steps": 1000, "move_seconds": 0.1}
    how |= {name: changes.pop(name) for name in (*how, "method") if name in changes}
    given = {"partition": partition, "seconds": seconds, "microbatches": 8} | changes
    return decide_rebalance(BalancerInput(**given), **how)


FROZEN = [0.1, 0.1, 1.0, 1.0]
"""Seconds of layers of which the first two have learnt enough."""


@pytest.mark.parametrize("method", ["exact", "diffusion"])
def test_a_rebalance_that_pays_is_decided(method):
    """A frozen prefix sends layers from the later rank to the earlier one."""
    decision = decide(even_partition(4, 2), FROZEN, method=method)
    assert decision.rebalance
    assert decision.partition.bounds == (0, 3, 4)
    assert decision.step_seconds_after < decision.step_seconds_before


@pytest.mark.parametrize(
    ("seconds", "changes", "want"),
    [
        (FROZEN, {"min_gain": 0.9}, "less than the 90.0% asked for"),
        (FROZEN, {"move_seconds": 1e6}, "moving costs"),
        (FROZEN, {"horizon_steps": 0}, "moving costs"),
        ([1.0] * 4, {}, "no other partition is faster"),
    ],
)
def test_a_rebalance_that_does_not_pay_is_not_made_and_has_a_reason(seconds, changes, want):
    """Hysteresis and the cost of moving are both in the decision's words; the best partition is kept."""
    decision = decide(even_partition(4, 2), seconds, **changes)
    assert not decision.rebalance
    assert decision.partition == even_partition(4, 2)
    assert want in decision.why


@pytest.mark.parametrize("method", ["exact", "diffusion"])
@given(seconds=SECONDS, data=st.data())
def test_no_decision_passes_a_memory_limit(method, seconds, data):
    """Wherever layers are sent, they fit the rank that gets them."""
    bytes = data.draw(st.lists(st.integers(1, 9), min_size=len(seconds), max_size=len(seconds)))
    partition = even_partition(len(seconds), 3)
    limit = int(partition.loads(bytes).max()) + data.draw(st.integers(0, 5))
    decision = decide(
        partition,
        seconds,
        capacity=RankCapacity(layer_bytes=bytes, memory=[limit] * 3),
        method=method,
        min_gain=0.0,
    )
    assert (decision.partition.loads(bytes) <= limit).all()


@pytest.mark.parametrize("method", ["exact", "diffusion", "network"])
def test_activations_in_flight_alone_change_the_decision(method):
    """Held bytes fit everywhere; the activations of the first rank's two microbatches in flight do not."""
    seconds, held, kept = [1.0, 1.0, 1.0, 1.0, 4.0, 4.0], [10] * 6, [5] * 6
    rank_bytes = [[h + flying * k for h, k in zip(held, kept, strict=True)] for flying in (2, 1)]
    given = {"method": method, "min_gain": 0.0, "link_seconds": [0.01]}
    by_layer = RankCapacity(layer_bytes=held, memory=[70, 70])
    by_rank = RankCapacity(layer_bytes=held, rank_bytes=rank_bytes, memory=[70, 70])
    too_little = RankCapacity(layer_bytes=held, rank_bytes=rank_bytes, memory=[40, 40])
    start = Partition(bounds=(0, 2, 6))
    assert decide(start, seconds, **given, capacity=by_layer).partition.bounds == (0, 4, 6)
    assert decide(start, seconds, **given, capacity=by_rank).partition.bounds == (0, 3, 6)
    with pytest.raises(PlanningError, match="do not fit"):
        decide(start, seconds, **(given | {"method": "exact"}), capacity=too_little)


def test_parameters_are_spread_evenly_where_that_is_asked_for_and_helps():
    """What is balanced is the parameters; whether it pays is told by the seconds."""
    parameters = [6, 1, 1, 1, 1, 2]
    heavy = [0.6, 0.1, 0.1, 0.1, 0.1, 0.2]
    decision = decide(even_partition(6, 2), heavy, balanced=parameters)
    assert decision.rebalance
    assert decision.partition.bounds == (0, 1, 6)
    reversed_cost = decide(even_partition(6, 2), heavy[::-1], balanced=parameters)
    assert not reversed_cost.rebalance


@pytest.mark.parametrize("slow_link", [0, 1, 2])
def test_a_decision_over_a_slow_link_is_no_slower_in_the_simulator(slow_link):
    """With one link slow, what the network-aware decision moves to beats the blind one's or equals it."""
    seconds = np.array([0.9, 1.1, 1.0, 1.3, 0.8, 1.0, 1.2, 0.7, 1.0, 1.1, 0.9, 1.0])
    links = [0.1, 0.1, 0.1]
    links[slow_link] = 1.2
    start = Partition(bounds=(0, 6, 8, 10, 12))
    microbatches = 32
    steps = {}
    for method, arguments in (("exact", {}), ("network", {"link_seconds": links})):
        decision = decide(start, microbatches * seconds, microbatches=32, method=method, **arguments)
        loads = microbatches * decision.partition.loads(seconds)
        steps[method] = simulated_step_seconds(loads / 3, loads * 2 / 3, microbatches, boundary_seconds=links)
        if method == "network":
            assert decision.step_seconds_after == pytest.approx(steps[method], rel=0.1)
    assert steps["network"] <= steps["exact"] * (1 + 1e-9)


def test_over_links_a_step_takes_as_much_longer_as_filling_does():
    """Where the balancer measures them, and their number is one less than the ranks'."""
    given = {"seconds": [8.0] * 4, "min_gain": 0.0, "link_seconds": [0.5]}
    over, alone = (decide(even_partition(4, 2), method=method, **given) for method in ("network", "exact"))
    assert alone.step_seconds_before == 7 * 2 + 4
    assert over.step_seconds_before == 7 * steady_period_seconds([2.0, 2.0], [0.5]) + 4 + 2 * 0.5
    with pytest.raises(PlanningError, match="2 links"):
        decide(even_partition(6, 3), [1.0] * 6, method="network", link_seconds=[0.1])


def test_deepspeeds_rule_decides_where_it_is_asked_for():
    """For reference: what moves is its partition, if that is faster; what it does not know is refused."""
    seconds = [1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
    decision = decide(even_partition(8, 2), seconds, method="deepspeed")
    assert decision.rebalance
    assert decision.partition == deepspeed_partition(seconds, 2)
    with pytest.raises(PlanningError, match="ignores speeds"):
        decide(even_partition(8, 2), seconds, method="deepspeed", capacity=RankCapacity(speeds=[1.0, 2.0]))
    with pytest.raises(PlanningError, match="ignores memory"):
        decide(
            even_partition(8, 2),
            seconds,
            method="deepspeed",
            capacity=RankCapacity(layer_bytes=[1] * 8, memory=[5, 5]),
        )


def test_an_unknown_balancer_is_refused_with_those_there_are():
    with pytest.raises(PlanningError, match="not one of exact, diffusion, network, deepspeed"):
        decide(even_partition(6, 2), [1.0] * 6, method="magic")


@pytest.mark.parametrize("seed", first_fast(range(5), 2))
def test_noise_sends_no_layer_back_and_forth(seed):
    """Layers measured 2 % too long or too short, a hundred times: at most one move, the first."""
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.5, 1.0, 24)
    partition, moves = even_partition(24, 4), []
    for look in range(100):
        noisy = seconds * random.uniform(0.98, 1.02, 24)
        decision = decide(partition, noisy, move_seconds=0.0)
        if decision.rebalance:
            moves.append(look)
            partition = decision.partition
    assert moves in ([], [0]), moves


@pytest.mark.slow
@examples(30)
@given(st.floats(0.0, 0.5), st.sampled_from(["1F1B", "GPipe"]), st.integers(4, 12))
def test_what_an_action_costs_is_found_from_a_step(action, schedule, microbatches):
    """The simulator's step with an action's cost gives that cost back."""
    forward, backward = np.array([3.0, 5.0, 2.0, 4.0]), np.array([6.0, 9.0, 5.0, 7.0])

    def predict(each):
        return 0.3 + simulated_step_seconds(
            forward, backward, microbatches, schedule=schedule, action_seconds=each
        )

    found = fitted_action_seconds(predict(action), predict, tolerance=1e-5)
    assert found == pytest.approx(action, abs=1e-3)
    assert fitted_action_seconds(0.5 * predict(0.0), predict) == 0.0


def test_the_first_stage_of_a_split_backward_has_weights_only():
    """Its input does not learn: the stage before waits for nothing, and all of it can fill the bubble."""
    forward, backward = np.full(4, 8.0), np.full(4, 16.0)
    step = simulated_step_seconds(forward, backward, 8, schedule="ZeroBubbleH1")
    # 1F1B needs (m + p - 1) x 3; zero bubble saves at least one forward of filling.
    assert 8 * 3 < step < (8 + 4 - 1) * 3


def test_interleaved_stages_are_simulated_with_several_stages_a_rank():
    """Two stages a rank halve the bubble: (p - 1) / (v m)."""
    whole = simulated_step_seconds(np.full(4, 8.0), np.full(4, 16.0), 8)
    halves = simulated_step_seconds(np.full(8, 4.0), np.full(8, 8.0), 8, schedule="Interleaved1F1B", chunks=2)
    assert whole / 24 - 1 == pytest.approx(3 / 8)
    assert halves / 24 - 1 == pytest.approx(3 / 16)


CUT = Partition(bounds=(0, 6, 12, 18, 24))


def noisy(noise, *, steps=8, seed=0):
    """Measured seconds of 24 layers that do not change, shape (steps, 24)."""
    return np.random.default_rng(seed).lognormal(0, noise, (steps, 24))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("noise", "low", "high"), [(0.001, 0.02, 0.02), (0.1, 0.02, 0.06), (0.2, 0.03, 0.1)])
def test_noise_raises_the_gain_that_is_asked_for(noise, low, high, seed):
    """One and a half standard errors of a rank's load: of six layers with a tenth each, 3 % of it."""
    assert low <= least_gain(0.02, noisy(noise, seed=seed), CUT) <= high


def test_more_layers_a_rank_and_more_steps_leave_less_noise():
    """It falls as their root."""
    found = [
        np.mean([least_gain(1e-9, noisy(0.1, steps=steps, seed=seed), cut) for seed in range(50)])
        for cut, steps in [(Partition(bounds=tuple(range(25))), 8), (CUT, 8), (CUT, 32)]
    ]
    assert found[0] < MOST
    assert found[1] < 0.5 * found[0] and found[2] < 0.7 * found[1]


@pytest.mark.parametrize(
    ("measured", "min_gain"),
    [
        (np.linspace(1, 2, 8)[:, None] * np.ones(24), 0.02),
        (np.array([1.0, 1, 1, 1, 3, 1, 1, 1])[:, None] * np.ones(24), 0.02),
        (np.where(np.arange(8)[:, None] < 4, 1.0, 3.0) ** (np.arange(24) > 12), 0.02),
        (noisy(0.2, steps=2), 0.02),
        (noisy(0.2), 0.0),
        (noisy(0.2), 0.3),
        (np.zeros((8, 24)), 0.02),
    ],
    ids=["all slower", "one slow step", "a jump", "too few steps", "any gain", "a high gain", "nothing"],
)
def test_what_is_no_noise_asks_for_no_more(measured, min_gain):
    """Steps that change as a whole, loads that jump once, and gains that the user has settled."""
    assert least_gain(min_gain, measured, CUT) == min_gain


def test_stages_of_a_rank_count_together():
    """What one stage of a rank has lost to the other is no gain of a move."""
    measured = noisy(0.0)
    measured[::2, :6] *= 1.5
    measured[::2, 6:12] *= 0.5
    assert least_gain(0.02, measured, CUT, (0, 0, 1, 1)) == 0.02
    assert least_gain(0.02, measured, CUT, (0, 1, 0, 1)) == MOST


def test_further_replicas_of_a_stage_are_no_ranks_without_work():
    """Their number makes its first rank's share of the work no less sure."""
    measured = noisy(0.05)
    assert least_gain(0.001, measured, CUT, (0, 3, 4, 7)) == least_gain(0.001, measured, CUT) < MOST
