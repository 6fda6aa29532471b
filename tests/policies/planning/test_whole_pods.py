"""Repacks of pods that hold several positions: whole pods stay, and of these the ones that hold most."""

import itertools

import pytest
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.repack import RepackDecision, kept_positions
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples


def decided(after, before):
    return RepackDecision(
        repack=True,
        kept_ranks=tuple(range(after.ranks)),
        released_ranks=tuple(range(after.ranks, before.ranks)),
        partition=after,
        step_seconds_before=1.0,
        step_seconds_after=1.0,
        why="",
    )


def travelling(positions, before, after, layer_bytes):
    return sum(
        size
        for layer, size in enumerate(layer_bytes)
        if positions[after.rank_of(layer)] != before.rank_of(layer)
    )


@st.composite
def repacks(draw):
    block, old = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    new = draw(st.integers(1, old - 1))
    layers = draw(st.integers(old * block, old * block + 6))

    def partition(ranks):
        cuts = draw(st.sets(st.integers(1, layers - 1), min_size=ranks - 1, max_size=ranks - 1))
        return Partition(bounds=(0, *sorted(cuts), layers))

    sizes = draw(st.lists(st.integers(1, 100), min_size=layers, max_size=layers))
    return block, partition(old * block), partition(new * block), sizes


@examples(200)
@given(repacks(), st.data())
def test_whole_pods_stay_on_the_fewest_nodes_and_the_fewest_bytes_travel(case, data):
    """The first block of positions among them; as good as every choice that keeps the order."""
    block, before, after, sizes = case
    per_node = data.draw(st.integers(1, before.ranks)) if block == 1 else data.draw(st.integers(0, 3))
    nodes = [(f"n{at // per_node}",) for at in range(before.ranks)] if per_node else []
    kept = kept_positions(decided(after, before), before, block, sizes, nodes)
    if len(set(nodes)) < 2 and block == 1:
        assert kept == decided(after, before).kept_ranks
        return
    blocks = [kept[i : i + block] for i in range(0, len(kept), block)]
    assert kept[0] == 0
    assert list(kept) == sorted(kept)
    assert all(b[0] % block == 0 and b == tuple(range(b[0], b[0] + block)) for b in blocks)

    def badness(positions):
        return (
            len({name for at in positions for name in (nodes[at] if nodes else ())}),
            travelling(positions, before, after, sizes),
        )

    choices = itertools.combinations(range(1, before.ranks // block), after.ranks // block - 1)
    best = min(badness([old * block + k for old in (0, *others) for k in range(block)]) for others in choices)
    assert badness(kept) == best


def test_positions_that_fill_no_whole_pods_are_refused():
    """A part of a pod is not released."""
    before, after = even_partition(8, 4), even_partition(8, 3)
    with pytest.raises(PlanningError, match="no multiples of the 2 that fill whole pods"):
        kept_positions(decided(after, before), before, 2, [1.0] * 8)


def test_a_repack_frees_a_whole_node():
    """Of two nodes with two ranks each, the second node's ranks go, though fewer bytes would travel."""
    before, after = even_partition(8, 4), even_partition(8, 2)
    nodes = [("a",), ("a",), ("b",), ("b",)]
    assert kept_positions(decided(after, before), before, 1, [1.0] * 8, nodes) == (0, 1)
    nodes = [("a",), ("b",), ("a",), ("b",)]
    assert kept_positions(decided(after, before), before, 1, [1.0] * 8, nodes) == (0, 2)
