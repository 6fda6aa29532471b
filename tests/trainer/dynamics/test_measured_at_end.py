"""What the changes have done is printed at the end of a job, and one that has changed nothing says so."""

import pytest

from tests.support.changes import change

pytestmark = pytest.mark.processes

IDLE = {
    "earlyExit": {"exits": {"confidence": "softmax", "threshold": 1.0, "vocabulary": 256}},
    "freezing": {"freezing": {"criterion": "weightChange", "threshold": 1e-12}},
    "sparseAttention": {"attention": {"pattern": "blocks", "blockSize": 4096}},
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_effects_are_printed_where_no_layer_is_ever_looked_at(gang, small_config, ranks):
    """Without rebalancing, or on one rank: once, after the last step, of the layers of all ranks."""
    config = small_config(
        totalSteps=7,
        dynamics=[change(kind, startStep=1, endStep=5) for kind in ("earlyExit", "pruning")],
        rebalance={"enabled": False},
    )
    running = gang(config, ranks=ranks)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    (exits,), (pruned,) = running.events("exits"), running.events("pruned")
    assert exits["step"] == pruned["step"] == 7
    assert sorted(exits["layers"]) == [str(layer) for layer in range(1, 7)]
    assert max(exits["layers"].values()) > 0 and min(pruned["layers"].values()) > 0
    assert "changes nothing" not in running.errors()


@pytest.mark.parametrize("kind", sorted(IDLE))
def test_a_change_that_the_data_never_reaches_says_so(gang, small_config, kind):
    """Its settings allow an effect, but nothing that it measures fulfils them."""
    fields = {**change(kind, startStep=1, endStep=5), **IDLE[kind]}
    running = gang(small_config(totalSteps=7, dynamics=[fields], rebalance={"enabled": False}), ranks=2)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    assert f"dynamics: {kind} changes nothing by step 7: " in running.errors()
