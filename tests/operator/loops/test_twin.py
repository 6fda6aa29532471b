"""The twin: what the operator kept, replayed by its own decisions."""

import datetime
import json
import sqlite3
from pathlib import Path

import pytest
from ballast_operator.cli.live.cost import cost
from ballast_operator.cli.live.history import twin
from ballast_operator.history.recording import TwinResult
from ballast_operator.history.store import History
from ballast_operator.history.twin import read_recording
from ballast_operator.kube.kinds import JOB
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.simulator.replay import replay
from click.testing import CliRunner

from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation, throughput

pytestmark = pytest.mark.slow

POOLS = [{"name": "v100", "nodeSelector": {"pool": "v100"}, "gpuType": "v100", "pricePerGpuHour": 36.0}]
BEGAN = START.timestamp()
SPEEDS = throughput(v100=10.0)


async def played(path: Path, *names: str, stages: tuple[int, int] = (2, 2)) -> Simulation:
    """A cluster of two GPUs once all jobs are done; each has fifty seconds of work."""
    simulation = Simulation(
        nodes={"a": ("v100", 2)}, history_file=path, nodePools=POOLS, objective={"policy": "fifo"}
    )
    speeds = [row for size in range(stages[0], stages[1] + 1) for row in throughput(size, v100=10.0)]
    for name in names:
        simulation.add_job(name, stages=stages, totalSteps=500, throughput=speeds)
        created = {"metadata": {"creationTimestamp": simulation.now.isoformat()}}
        simulation.world.patch(JOB, NAMESPACE, name, created)
        for _ in range(5):
            await simulation.tick()
            simulation.history.write()
    for _ in range(1000):
        await simulation.tick()
        simulation.history.write()
        if all(simulation.state(name) == "Succeeded" for name in names):
            return simulation
    raise AssertionError(simulation.all_statuses())


async def test_the_twin_takes_as_long_and_pays_as_much_as_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that wait for one another; deleted ones, too. A later begin finds them where they were.

    Jobs that were not there at the time count for nothing, however many they are.
    """
    path = tmp_path / "history.db"
    simulation = await played(path, "one", "two", "three")
    simulation.world.drop(JOB, NAMESPACE, "one")
    await simulation.tick()
    simulation.history.write()
    ended = simulation.now.timestamp()
    found = replay(read_recording(History(path), BEGAN, ended))
    assert [job.job for job in found.jobs] == [f"{NAMESPACE}/{name}" for name in ("one", "two", "three")]
    assert found.time_error == pytest.approx(0, abs=0.05) and found.cost_error == pytest.approx(0, abs=0.05)
    assert found.jobs[2].recorded_seconds > 140 and found.agrees() and not found.left_out
    late = replay(read_recording(History(path), BEGAN + 30, ended))
    assert late.jobs[0].recorded_seconds == pytest.approx(found.jobs[0].recorded_seconds - 29, abs=2)
    assert late.time_error == pytest.approx(0, abs=0.1) and late.jobs[0].starts == 0
    before = replay(read_recording(History(path), BEGAN, BEGAN + 30))
    assert (before.jobs, before.running, before.agrees()) == ((), 3, None)
    monkeypatch.setattr("ballast_operator.history.twin.MOST_JOBS", 1)
    alone = read_recording(History(path), BEGAN + 110, ended)
    assert [job.one.name for job in alone.jobs] == [f"{NAMESPACE}/three"]


async def test_a_job_that_was_suspended_is_replayed_with_the_time_that_it_was(tmp_path: Path) -> None:
    """What is kept of the limits of spot machines is there, too."""
    path = tmp_path / "history.db"
    simulation = await played(path)
    simulation.add_job("one", stages=(2, 2), totalSteps=500, throughput=SPEEDS)
    for number in range(400):
        if number in (20, 80):
            simulation.change("one", suspend=number == 20)
        await simulation.tick()
        simulation.history.write()
        if simulation.state("one") == "Succeeded":
            break
    recorded = read_recording(History(path), BEGAN, simulation.now.timestamp())
    ((begin, end),) = recorded.jobs[0].suspended
    assert 55 < end - begin < 65 and recorded.clusters[0].spot == SpotLimits()
    found = replay(recorded)
    assert found.jobs[0].starts == 2 and found.time_error == pytest.approx(0, abs=0.05)


async def test_a_deadline_and_a_budget_are_replayed_as_they_were_stated_last(tmp_path: Path) -> None:
    """Whenever a decision saw what was left of them, and less what was paid before."""
    path = tmp_path / "history.db"
    simulation = Simulation(
        nodes={"a": ("v100", 2)}, history_file=path, nodePools=POOLS, objective={"policy": "fifo"}
    )
    stated = {"deadline": (START + datetime.timedelta(hours=1)).isoformat(), "budget": 50.0}
    simulation.add_job("one", stages=(2, 2), totalSteps=5000, throughput=SPEEDS, **stated)
    for number in range(200):
        if number == 100:
            later = (START + datetime.timedelta(hours=2)).isoformat()
            simulation.change("one", deadline=later, budget=80.0, throughput=throughput(v100=11.0))
        await simulation.tick()
        simulation.history.write()
    for since, paid in ((0, 0.0), (150, simulation.status("one").cost_so_far * 0.75)):
        job = read_recording(History(path), BEGAN + since, simulation.now.timestamp()).jobs[0].one.job
        assert job.deadline == pytest.approx(7200 - since, abs=2)
        assert job.budget == pytest.approx(80.0 - paid, abs=0.3)


async def test_history_that_begins_while_a_job_trains_is_replayed_from_its_begin(tmp_path: Path) -> None:
    """With the steps that were left then, at the speed since then."""
    path = tmp_path / "history.db"
    simulation = Simulation(nodes={"a": ("v100", 2)}, nodePools=POOLS, objective={"policy": "fifo"})
    simulation.add_job("one", stages=(2, 2), totalSteps=500, throughput=SPEEDS)
    await simulation.ticks(45)
    simulation.history_file = path
    simulation.start_operator()
    began = simulation.now.timestamp()
    while simulation.state("one") != "Succeeded":
        await simulation.tick()
        simulation.history.write()
    recording = read_recording(History(path), began - 3600, simulation.now.timestamp())
    assert recording.since == pytest.approx(began, abs=2)
    assert recording.jobs[0].one.job.steps_remaining == pytest.approx(200, abs=30)
    assert replay(recording).time_error == pytest.approx(0, abs=0.1)


async def test_the_condition_says_whether_the_twin_agrees(tmp_path: Path) -> None:
    """By the newest result of the file; the status has the figures, for `ballast whatif`."""
    path = tmp_path / "history.db"
    simulation = await played(path, "one")
    command = ["--file", str(path), "--since", str(START), "--until", simulation.now.isoformat()]
    kept = CliRunner().invoke(twin, [*command, "--keep", "--output", "json"])
    assert kept.exit_code == 0, kept.output
    assert json.loads(kept.output)["agrees"] is True
    assert "off by" in CliRunner().invoke(twin, command).output

    async def condition() -> dict[str, str]:
        await simulation.tick(decides=True)
        status = simulation.policy()["status"]
        assert status["twin"]["jobs"] in (0, 1)
        return next(each for each in status["conditions"] if each["type"] == "TwinAgrees")

    simulation.history.replay_daily()
    assert (await condition())["status"] == "True"
    for agrees, word in ((False, "False"), (None, "Unknown")):
        result = TwinResult(since=BEGAN, until=simulation.now.timestamp(), jobs=0, agrees=agrees)
        simulation.history.twin = result
        assert (await condition())["status"] == word


async def test_cost_against_other_policies_and_the_least(tmp_path: Path) -> None:
    """Each policy's replay beside what was paid; one that is not there is refused."""
    path = tmp_path / "history.db"
    simulation = await played(path, "one", "two")
    command = ["--history", str(path), "--since", str(START), "--until", simulation.now.isoformat()]
    done = CliRunner().invoke(cost, [*command, "--against", "min-cost", "--output", "json"])
    found = json.loads(done.output)
    (other,) = found["policies"]
    assert (found["jobs"], found["in_force"]["policy"], other["policy"]) == (2, "fifo", "min-cost")
    assert 0 < found["least_cost"] <= other["least_cost"] <= other["cost"] * 1.0001
    assert (
        "No policy could have paid less" in CliRunner().invoke(cost, [*command, "--against", "fifo"]).output
    )
    assert CliRunner().invoke(cost, [*command, "--against", "luck"]).exit_code == 1
    assert CliRunner().invoke(cost, [*command, "--against", "fifo", "--by", "job"]).exit_code == 2
    alone = CliRunner().invoke(cost, command)
    assert alone.exit_code == 2 and "go with --against" in alone.output


@pytest.mark.parametrize("part", [("5.0", "NaN"), ('"asks":{', '"topology":{')], ids=("edited", "older"))
async def test_what_cannot_be_read_is_left_out_with_why(tmp_path: Path, part: tuple[str, str]) -> None:
    """The rest is replayed; without anything there is nothing to compare. Of another release: as edited."""
    path = tmp_path / "history.db"
    simulation = await played(path, "one", "two")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE kept SET content = replace(content, ?, ?) WHERE what = 'seen' AND "
                         "uid = (SELECT uid FROM jobs WHERE name = 'one')", part)  # fmt: skip
    database.close()
    found = replay(read_recording(History(path), BEGAN, simulation.now.timestamp()))
    assert list(found.left_out) == [f"{NAMESPACE}/one"] and [job.job for job in found.jobs] == [
        f"{NAMESPACE}/two"
    ]
    nothing = replay(read_recording(History(path), 0.0, 1.0))
    assert nothing.agrees() is None and TwinResult.of(nothing).text.startswith("no job")
    for words in (["--since", "2026-01-02", "--until", "2026-01-01"], ["--since", "soon"]):
        assert CliRunner().invoke(twin, ["--file", str(path), *words]).exit_code == 2
    missing = CliRunner().invoke(twin, ["--file", str(tmp_path / "none.db")])
    assert missing.exit_code == 1 and "To fix" in missing.output
    History(path).put([TwinResult(since=0.0, until=1.0, jobs=0).as_row()], create=False)
