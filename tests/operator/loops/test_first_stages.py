"""The first stages of a launch come from what was measured: by the job, or by another of its kind."""

import pytest
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_policies.contract import PLAN_KEY, Plan, plan_config_map_name

from tests.operator.loops.simulated.machines import Trainer
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

MODEL = {"name": "gpt", "layers": 6}
DEAR_AT_THE_END = (0.1, 0.1, 0.1, 0.1, 0.3, 0.3)


@pytest.fixture
def measured(monkeypatch):
    """Trainers report the seconds and bytes of six layers."""
    report = Trainer._report

    def with_layers(trainer, plan):
        return report(trainer, plan).replace(layer_seconds=DEAR_AT_THE_END, layer_bytes=(10**9,) * 6)

    monkeypatch.setattr(Trainer, "_report", with_layers)


def a_cluster(**spec):
    pools = [{"name": "gpu", "nodeSelector": {"pool": "gpu"}, "gpuType": "gpu", **spec}]
    return Simulation(nodes={"a": ("gpu", 4)}, nodePools=pools)


async def sizes_of(simulation, name):
    """Layers of each stage of the job's launch."""
    await simulation.until(lambda: simulation.state(name) == "Running")
    data = simulation.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name(name))["data"]
    return [stage.end_layer - stage.first_layer for stage in Plan.from_json(data[PLAN_KEY]).stages]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 2]),
        ({"rebalance": {"enabled": False}}, [3, 3]),
        ({"rebalance": {"by": "parameters"}}, [3, 3]),
        ({"model": {"name": "gpt", "layers": 6, "args": {"width": 512}}}, [3, 3]),
    ],
    ids=["of the kind", "its layers stay where they are", "parameters are spread", "another model"],
)
async def test_the_second_job_of_a_kind_starts_with_the_stages_of_the_first_ones_layers(
    measured, changes, expected
):
    """The first starts with even ones: nothing is known of its layers."""
    simulation = a_cluster()
    simulation.add_job("first", model=MODEL, trainer={"total": 1000, "pace": 1})
    assert await sizes_of(simulation, "first") == [3, 3]
    for _ in range(3):
        await simulation.tick()
    simulation.add_job("second", **{"model": MODEL, **changes})
    assert await sizes_of(simulation, "second") == expected


@pytest.mark.slow
async def test_what_was_measured_outlives_the_operator(measured):
    """It is saved once a round, with the measured speeds."""
    simulation = a_cluster()
    simulation.add_job("first", model=MODEL, trainer={"pace": 5})
    await simulation.until(lambda: simulation.state("first") == "Succeeded")
    for _ in range(2):
        await simulation.tick(seconds=61)
    simulation.start_operator()
    simulation.add_job("second", model=MODEL)
    assert await sizes_of(simulation, "second") == [4, 2]


async def test_measured_bytes_keep_jobs_of_the_kind_from_gpus_that_they_do_not_fit(measured):
    """Two GPUs with 2.5 GB do not hold six layers of 1 GB; the gang that runs stays."""
    simulation = a_cluster(memoryPerGpu="2500M")
    simulation.add_job("first", model=MODEL, trainer={"total": 1000, "pace": 1})
    await simulation.until(lambda: simulation.state("first") == "Running")
    for _ in range(3):
        await simulation.tick()
    simulation.add_job("second", model=MODEL)
    await simulation.until(lambda: simulation.status("second").condition("Admitted") is not None)
    refused = simulation.status("second").condition("Admitted")
    assert refused.reason == "ExceedsMemory"
    assert "on 2 GPUs its layers take at least 3 GB of the fullest one" in refused.message
    assert simulation.state("first") == "Running"
