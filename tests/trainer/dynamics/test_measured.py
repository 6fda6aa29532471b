"""What the changes measure is printed at each look at the layers."""

import pytest

from tests.support.changes import change


@pytest.mark.processes
def test_loads_are_measured_while_training(gang, small_config):
    """Of every layer, over all ranks: experts' loads, exits, sparsity; they follow from the data."""
    steps = {"startStep": 2, "endStep": 6}
    kinds = ("mixtureOfExperts", "earlyExit", "pruning")
    config = small_config(
        totalSteps=9,
        dynamics=[change(kind, **steps) for kind in kinds],
        rebalance={"enabled": True, "everySteps": 4, "minGain": 0.9},
    )
    running = gang(config, ranks=2)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    looks = running.events("tokenImbalance")
    assert [look["step"] for look in looks] == [4, 8, 9]
    for look in looks:
        assert sorted(look["layers"]) == ["2", "4", "6"]
        for layer, loads in look["loads"].items():
            assert len(loads) == 4
            assert look["layers"][layer] == pytest.approx(max(loads) * 4 / sum(loads))
    assert len({value for look in looks for value in look["layers"].values()}) > 2
    (exits, later, _) = running.events("exits")
    assert sorted(exits["layers"]) == [str(layer) for layer in range(1, 7)]
    assert list(later["layers"].values()) == sorted(later["layers"].values())
    assert 0.5 < sum(running.events("pruned")[1]["layers"].values()) / 8 < 1
