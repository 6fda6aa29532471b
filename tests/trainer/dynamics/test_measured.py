"""What the changes measure is printed at each look and at the end; one that changes nothing says so."""

import pytest
from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_trainer.dynamics.registry import build_dynamic

from tests.support.changes import change
from tests.support.distributions import install
from tests.support.examples import first_daily

IDLE = {
    "earlyExit": {"exits": {"confidence": "softmax", "threshold": 1.0, "vocabulary": 256}},
    "freezing": {"freezing": {"criterion": "weightChange", "threshold": 1e-12}},
    "sparseAttention": {"attention": {"pattern": "blocks", "blockSize": 4096}},
}
EVENTS = {"earlyExit": "exits", "freezing": "frozen", "sparseAttention": "attention"}


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
    running = gang(config, ranks=2).succeeded()
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


@pytest.mark.processes
@pytest.mark.parametrize("kind", first_daily(sorted(IDLE)))
def test_effects_are_printed_where_no_layer_is_ever_looked_at(gang, small_config, kind):
    """Without rebalancing, once, after the last step, of the layers of all ranks.

    A change that the data never reaches says so: its settings allow an effect, but nothing that it measures
    fulfils them.
    """
    changes = [
        {**change(kind, startStep=1, endStep=5), **IDLE[kind]},
        change("pruning", startStep=1, endStep=5),
    ]
    running = gang(
        small_config(totalSteps=7, dynamics=changes, rebalance={"enabled": False}), ranks=2
    ).succeeded()
    assert f"dynamics: {kind} changes nothing by step 7: " in running.errors()
    assert running.errors().count("changes nothing") == 1
    if kind == "freezing":
        assert "layer 0 would be the first, its figure is " in running.errors()
    (idle,), (pruned,) = running.events(EVENTS[kind]), running.events("pruned")
    assert idle["step"] == pruned["step"] == 7
    assert len(idle["layers"]) == (8 if kind == "freezing" else 6), "those of all ranks"
    assert len(pruned["layers"]) == 7 and min(pruned["layers"].values()) > 0


@pytest.fixture
def fixed(tmp_path, monkeypatch):
    """The name of a kind of another distribution, whose objects cannot be changed."""
    code = """
import dataclasses

from ballast_policies.planning.dynamics import DynamicCase


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    config: object
    layers: int


ROW = DynamicCase(summary="Nothing changes.", build="acme_fixed:Fixed")
"""
    rows, modules = {"acme.fixed": "acme_fixed:ROW"}, {"acme_fixed": code}
    install(tmp_path, "acme-fixed", "ballast.dynamics", rows, modules)
    monkeypatch.syspath_prepend(tmp_path)
    DYNAMICS.rescan()
    yield "acme.fixed"
    monkeypatch.undo()
    DYNAMICS.rescan()


def test_a_change_of_another_distribution_may_be_immutable(fixed):
    """Nothing is written into what its code returns."""
    config = DynamicConfig(kind=fixed)
    built = build_dynamic(config, 3)
    assert (built.config, built.layers) == (config, 3)
