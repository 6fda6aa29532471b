"""Jobs with ``planner``: what a launch measures of its layers counts for the plan of the next one."""

import datetime

import pytest
from ballast_operator.kube.kinds import JOB
from ballast_operator.steps import running as progress
from ballast_operator.views.planned_degrees import MEASURED_CHANGE
from ballast_operator.views.spec import read_spec

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

LAYERS, SECONDS = 8, 0.03
AS_STATED, SLOW_END = (SECONDS,) * LAYERS, (SECONDS,) * 6 + (3 * SECONDS,) * 2


def planner(layers: tuple[float, ...] = AS_STATED) -> dict:
    """Two or three layers fit a GPU, so there are several stages."""
    rows = [{"forwardSeconds": one / 3, "backwardSeconds": 2 * one / 3, "heldBytes": 2e8} for one in layers]
    gpus = [{"gpuType": "fast", "memory": "700M"}]
    return {"profiles": [{"layers": rows}], "gpus": gpus, "bandwidth": 1e9}


def add(simulation: Simulation, measured: tuple[float, ...], name: str = "one", **spec) -> None:
    simulation.add_job(
        name,
        trainer={"layers": measured},
        **{
            "totalSteps": 10_000_000,
            "stages": (4, 4),
            "model": {"name": "gpt", "layers": LAYERS},
            "repack": {"enabled": False},
            "planner": planner(),
            **spec,
        },
    )


async def running(measured: tuple[float, ...], **spec) -> Simulation:
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=30)
    add(simulation, measured, **spec)
    await simulation.running("one")
    return simulation


def planned(simulation: Simulation):
    """The plan of the job's next launch."""
    return read_spec(simulation.world.get(JOB, NAMESPACE, "one"))[0].plans["fast"][4]


async def test_the_next_launch_has_the_plan_of_the_layers_as_they_were_measured():
    """That of a job whose spec states them; the launch that measured them goes on as it is."""
    simulation = await running(SLOW_END)
    first = simulation.status("one").allocation.degrees
    await simulation.ticks(100)
    status = simulation.status("one")
    assert (status.launches, status.allocation.degrees) == (1, first)
    assert [(one.gpu_type, one.ratios) for one in status.measured_layers] == [
        ("fast", (1.0,) * 6 + (3.0,) * 2)
    ]
    await simulation.relaunched("one")
    right, _ = read_spec({"metadata": {"name": "right"}, "spec": stating(simulation, SLOW_END)})
    allocation = simulation.status("one").allocation
    degrees, (best,) = allocation.degrees, right.candidates_on(allocation.by_pool)
    assert degrees.layers == simulation.configuration("one").plan.layers == best.layers
    assert degrees.layers != first.layers
    assert degrees.step_seconds == pytest.approx(best.step_seconds)
    await simulation.running("one")
    assert "predicted from layers measured on fast" in simulation.condition("one", "Admitted").message
    text = simulation.explained("one")
    assert f"planned  {degrees}" in text and "from layers measured on fast" in text


def stating(simulation: Simulation, layers: tuple[float, ...]) -> dict:
    return {**simulation.world.get(JOB, NAMESPACE, "one")["spec"], "planner": planner(layers)}


async def test_a_new_operator_plans_by_what_was_measured():
    simulation = await running(SLOW_END)
    await simulation.ticks(30)
    (expected,) = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))[0].candidates_on(
        simulation.status("one").allocation.by_pool
    )
    simulation.start_operator()
    await simulation.relaunched("one")
    assert simulation.status("one").allocation.degrees == expected
    assert expected.measured_on == ("fast",)


@pytest.mark.parametrize(
    "measured",
    [
        (),
        AS_STATED,
        tuple(SECONDS * (1 + 0.95 * MEASURED_CHANGE * sign) for sign in (1, -1) * (LAYERS // 2)),
        (SECONDS * 2000,) * LAYERS,
        (0.0,) * LAYERS,
        SLOW_END[1:],
        (*SLOW_END, SECONDS),
    ],
    ids=["none", "as-stated", "noise", "absurd", "nothing", "too-few", "too-many"],
)
async def test_what_is_no_news_and_what_is_no_measurement_changes_no_plan(measured):
    simulation = await running(measured)
    await simulation.ticks(60)
    assert simulation.status("one").measured_layers == ()
    assert planned(simulation).measured_on == ()


@pytest.mark.slow
async def test_a_job_that_reports_something_else_each_time_is_planned_anew_now_and_then(monkeypatch):
    """Its reports are news once in MEASURED_AGAIN; another job of the same spec is planned as stated."""
    again = datetime.timedelta(minutes=1)
    monkeypatch.setattr(progress, "MEASURED_AGAIN", again)
    simulation = Simulation(nodes={"a": ("fast", 8)}, roundSeconds=30)
    add(simulation, SLOW_END)
    add(simulation, AS_STATED, "other")
    await simulation.running("one", "other")
    taken, began = set(), simulation.now
    while simulation.now - began < 2.5 * again:
        simulation.trainers["one"].layers = simulation.trainers["one"].layers[::-1]
        await simulation.tick()
        taken |= {one.at for one in simulation.status("one").measured_layers}
    assert 2 <= len(taken) <= 3
    assert simulation.status("other").measured_layers == ()
    assert [simulation.status(name).launches for name in ("one", "other")] == [1, 1]


@pytest.mark.slow
async def test_what_was_measured_counts_for_the_planner_that_it_was_measured_with():
    """An edited one states what its user knows by now; where that is as wrong, it is measured again."""
    simulation = await running(SLOW_END)
    await simulation.ticks(30)
    assert planned(simulation).measured_on == ("fast",)
    simulation.change("one", planner=planner(SLOW_END))
    await simulation.ticks(30)
    assert planned(simulation).measured_on == ()
    simulation.change("one", planner=planner(SLOW_END[::-1]))
    await simulation.ticks(30)
    (again,) = simulation.status("one").measured_layers
    assert again.ratios == pytest.approx((1 / 3,) * 2 + (1.0,) * 4 + (3.0,) * 2, rel=0.01)


@pytest.mark.slow
async def test_a_gang_grows_by_the_plan_of_the_measured_layers():
    """GPUs that come free: the larger gang has the plan of layers measured on the smaller one."""
    simulation = Simulation(nodes={"a": ("fast", 4), "b": ("fast", 4)}, roundSeconds=30)
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    add(simulation, SLOW_END, stages=(4, 8))
    simulation.trainers["one"].scales = True
    await simulation.running("one", "two")
    await simulation.until(lambda: simulation.status("one").allocation.gpus == 8)
    spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    degrees = simulation.status("one").allocation.degrees
    assert degrees == spec.plans["fast"][8] and degrees.measured_on == ("fast",)
