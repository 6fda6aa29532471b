"""`ballast whatif`, and which jobs and namespaces commands mean."""

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from ballast_operator.cli.live.policy_diff import as_text as policy_text
from ballast_operator.cli.live.policy_diff import difference
from ballast_operator.cli.live.whatif import pose, read_change, read_cluster, whatif
from ballast_operator.cli.live.whatif_over_time import changed
from ballast_operator.cli.main import main
from ballast_operator.kube import client
from ballast_operator.kube.kinds import JOB, NODE, POD, POLICY
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.contract.messages import JOB_LABEL
from ballast_policies.simulator.whatif import Setup, Side, compare
from click.testing import CliRunner

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.world import World

DEMO = Path(__file__).parents[4] / "examples" / "demo"
GPUS = {"v100": 4, "p100": 2, "k80": 4, "p100-spot": 2}


def cluster(policies=1, stages=4):
    """The demo's policies and jobs, of at most so many stages, and a node for each of its pools."""
    world = World()
    for manifest in [yaml.safe_load(file.read_text()) for file in sorted(DEMO.glob("*.yaml"))]:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "TrainingJob":
            manifest["spec"]["pipeline"]["maxStages"] = min(stages, manifest["spec"]["pipeline"]["maxStages"])
            world.put(JOB, {**manifest, "metadata": {"name": name, "namespace": "default"}})
            continue
        for copy in range(policies):
            world.put(POLICY, {**manifest, "metadata": {"name": name + (f"-{copy}" if copy else "")}})
    for pool, gpus in GPUS.items():
        item = node(pool, pool, gpus)
        item["metadata"]["labels"]["ballast.dev/pool"] = pool
        world.put(NODE, item)
    return FakeCluster(world)


def serve(monkeypatch, found):
    """Commands connect to it, whatever the kubeconfig."""

    async def connect(kubeconfig):
        return contextlib.nullcontext(found)

    monkeypatch.setattr(client, "connect", connect)


def read(found, other="max-min-fairness", name="", **how):
    live = asyncio.run(read_cluster(found, name))
    snapshot, objective = live.snapshot, live.policy.spec.objective
    return pose(snapshot, objective, other, **how)


def test_the_problem_is_the_operators_with_the_pools_prices():
    """The demo's jobs and GPUs; a type's price is the mean over its pools."""
    problem, notes = read(cluster())
    assert problem.capacity == {"k80": 4, "p100": 4, "v100": 4}
    assert {job.name for job in problem.jobs} == {
        "default/transformer",
        "default/recommender",
        "default/recurrent",
    }
    assert problem.prices["p100"] == pytest.approx((2 * 1.46 + 2 * 0.43) / 4)
    assert notes == ()


def test_gpus_of_a_pod_that_does_not_end_are_promised_to_nobody():
    """As the operator has it."""
    found = cluster()
    trainer = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod = {
        "metadata": {
            "name": "gone-1-0",
            "namespace": "default",
            "labels": {JOB_LABEL: "gone"},
            "ownerReferences": [{"kind": JOB.kind, "name": "gone", "uid": "u", "controller": True}],
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"nodeName": "v100", "containers": [trainer]},
        "status": {"phase": "Running"},
    }
    found.world.put(POD, pod)
    problem, _ = read(found)
    assert problem.capacity == {"k80": 4, "p100": 4, "v100": 3}


def test_what_the_operator_knows_of_budgets_and_spot_pools_is_decided_on_too(monkeypatch):
    """Teams that have spent their budget are left out, which is told; preemptions and start-ups count."""
    found = cluster()
    (item,) = found.world.items(POLICY)
    at = "2026-11-27T12:00:00Z"
    item["spec"] = {**item["spec"], "budgets": {"audio": {"amount": 10.0}}}
    hazard = {"pool": "p100-spot", "nodeHours": 4.0, "preemptions": 3, "perHour": 0.7}
    teams = [{"team": "audio", "since": at, "cost": 12.0, "deletedJobsCost": 12.0}]
    item["status"] = {"billAt": at, "hazard": [hazard], "teams": teams}
    recurrent = next(job for job in found.world.items(JOB) if job["metadata"]["name"] == "recurrent")
    recurrent["spec"] = {**recurrent["spec"], "entity": "audio"}
    snapshot = asyncio.run(read_cluster(found)).snapshot
    assert {job.name for job in snapshot.jobs} == {"default/transformer", "default/recommender"}
    serve(monkeypatch, found)
    said = "left out: default/recurrent: the jobs of team audio have cost its budget of 10. To fix: "
    for options in ((), ("--over-time", "1")):
        assert CliRunner().invoke(whatif, options).stdout.count(said) == 1
    assert snapshot.preempted["p100-spot"].preemptions == 3
    prices = {pool.pool: pool.price for pool in snapshot.useful_prices}
    assert prices["p100-spot"] > 0.43 and prices["p100"] == 1.46
    assert snapshot.start_seconds["p100-spot"] > 0
    dear = changed(snapshot, Setup(policy="min-cost", prices={"p100": 4.0})).useful_prices
    assert {pool.pool: round(pool.price / 4.0, 2) for pool in dear if pool.gpu_type == "p100"} == {
        "p100": 1.0,
        "p100-spot": round(prices["p100-spot"] / 0.43, 2),
    }


def test_a_changed_policy_says_what_the_next_round_would_do():
    """Each field and job that differs; the same policy changes nothing."""
    found = cluster()
    (item,) = found.world.items(POLICY)
    changed = {**item, "spec": {**item["spec"], "objective": {"policy": "min-cost"}}}
    differs = difference(*asyncio.run(read_change(found, changed)))
    assert differs["fields"] == {"spec.objective.policy": ["max-min-fairness", "min-cost"]}
    assert differs["jobs"] and differs["same"] + len(differs["jobs"]) == 3
    assert 'spec.objective.policy: "max-min-fairness" -> "min-cost"' in policy_text(differs)
    pools = [pool for pool in item["spec"]["nodePools"] if pool["name"] != "v100"]
    without = {**item, "spec": {**item["spec"], "nodePools": pools}}
    differs = difference(*asyncio.run(read_change(found, without)))
    assert "spec.nodePools[v100].gpuType" in differs["fields"]
    assert difference(*asyncio.run(read_change(found, item))) == {"fields": {}, "jobs": [], "same": 3}
    with pytest.raises(ProblemError, match="cannot be used"):
        asyncio.run(read_change(found, {**item, "spec": {"objective": float("nan")}}))
    with pytest.raises(ProblemError, match="there is no ClusterPolicy other; the cluster has"):
        asyncio.run(read_change(found, {"metadata": {"name": "other"}}))


def test_two_more_v100_help_the_job_that_has_to_share_them(monkeypatch):
    """The transformer no longer spends half of its time on P100s; no job loses."""
    serve(monkeypatch, cluster())
    content = json.loads(CliRunner().invoke(whatif, ["--add", "v100=2", "--output", "json"]).stdout)
    assert {job["job"]: job["verdict"] for job in content["jobs"]} == {
        "default/transformer": "gains",
        "default/recommender": "same",
        "default/recurrent": "same",
    }
    assert "1 gain, 0 lose, 2 the same" in CliRunner().invoke(whatif, ["--add", "v100=2"]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--add", "h100=2"], "--add: h100 is not one of k80, p100, v100"),
        (["--prices", "h100=2"], "--prices: h100 is not one of k80, p100, v100"),
        (["--add", "v100=-5"], "--add: v100: 5 GPUs cannot be taken away, there are 4"),
        (["--add", "v100=9999999999999"], "--add: v100: 9999999999999 GPUs are more than the 1000000"),
    ],
)
def test_gpus_that_the_cluster_has_not_are_refused(monkeypatch, arguments, words):
    serve(monkeypatch, cluster())
    done = CliRunner().invoke(whatif, arguments)
    assert done.exit_code == 2 and words in " ".join(done.stderr.split())


def test_policies_of_prices_choose_between_the_pools_of_a_type():
    """P100s on spot cost 0.43, others 1.46: min-cost pays for the spot ones, and names the GPU type."""
    live = asyncio.run(read_cluster(cluster(stages=2)))
    snapshot, objective = live.snapshot, live.policy.spec.objective
    problem, _ = pose(snapshot, objective, "min-cost")
    of_types = [Side(setup=Setup(policy=name), problem=problem) for name in ("max-min-fairness", "min-cost")]
    mean = compare(*of_types)
    found = compare(*(dataclasses.replace(side, pools=snapshot.capacity.pools) for side in of_types))
    (recommender,) = [job for job in found.jobs if job.job == "default/recommender"]
    assert set(recommender.types_after) == {"p100"}
    assert found.cost_after < mean.cost_after
    assert found.cost_before == mean.cost_before


def test_a_policy_of_prices_on_a_cluster_that_has_none_says_what_it_took():
    """A price given on the command line takes the default's place, on both sides."""
    unpriced = cluster()
    for item in unpriced.world.items(POLICY):
        for pool in item["spec"]["nodePools"]:
            pool["pricePerGpuHour"] = 0
    problem, (note,) = read(unpriced, "min-cost")
    assert set(problem.prices.values()) == {1.0}
    assert "none for k80, p100, v100; 1 counts" in note
    prices = {"v100": 3.0, "p100": 1.0, "k80": 0.5}
    problem, notes = read(unpriced, "min-cost", prices=prices)
    assert problem.prices == prices
    assert notes == ()


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ProblemError, match="--policy: 'luck' is not one of max-min-fairness"):
        read(cluster(), "luck")


def test_which_of_two_policies_is_meant_must_be_said():
    """Named ones are taken; unknown ones are refused with those there are."""
    assert len(read(cluster(policies=2), name="demo-1")[0].jobs) == 3
    for name in ("", "gone"):
        with pytest.raises(ProblemError, match="the cluster has demo, demo-1"):
            read(cluster(policies=2), name=name)
    with pytest.raises(ProblemError, match=r"there is no ClusterPolicy\. To fix: create one"):
        read(cluster(policies=0))


@pytest.mark.slow
def test_over_time_shows_when_each_job_would_start_and_end(monkeypatch):
    """Beside the comparison, in text and in JSON, with the error bar; all end within the hour."""
    twin = {"time": "2026-01-01T00:00:00Z", "jobs": 7, "timeError": 0.021, "costError": -0.013}
    there = cluster()
    there.world.items(POLICY)[0]["status"] = {"twin": twin}
    serve(monkeypatch, there)
    arguments = ["--add", "v100=2", "--over-time", "1"]
    text = CliRunner().invoke(whatif, arguments)
    assert "completion times of the last replay were off by +2.1%, costs by -1.3% (7 jobs" in text.stdout
    assert "1 gain, 0 lose, 2 the same" in text.stdout
    assert "3 -> 3 of 3 jobs end" in text.stdout
    content = json.loads(CliRunner().invoke(whatif, [*arguments, "--output", "json"]).stdout)
    assert content["after"]["more"] == {"v100": 2} and content["twin"] == twin
    (transformer,) = [row for row in content["over_time"]["jobs"] if row["job"] == "default/transformer"]
    assert transformer["after"]["ends_seconds"] < transformer["before"]["ends_seconds"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prices", "excerpt"], "--over-time, --cluster-policy: not with --prices FOLDER"),
        (["--policy", "gandiva"], "--over-time: policy gandiva puts any two jobs on the same GPUs"),
    ],
)
def test_over_time_is_refused_where_it_cannot_apply(monkeypatch, arguments, words):
    serve(monkeypatch, cluster())
    done = CliRunner().invoke(whatif, [*arguments, "--over-time", "1"])
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert "To fix:" in done.stderr


@pytest.mark.parametrize("more", [[], ["--add", "p100=2"]])
def test_other_limits_of_spot_machines(monkeypatch, more):
    """Without spot machines the spot P100s are in nobody's share, and no gang starts there later.

    Nor are those that are added, which are the cheapest ones.
    """
    there = cluster(stages=2)
    (item,) = (one for one in there.world.items(JOB) if one["metadata"]["name"] == "recommender")
    there.world.put(JOB, {**item, "metadata": {"name": "second", "namespace": "default"}})
    serve(monkeypatch, there)
    arguments = [*more, "--spot", "onDemandShare=1", "--over-time", "2000"]
    found = CliRunner().invoke(whatif, [*arguments, "--output", "json"])
    content = json.loads(found.stdout)
    assert content["after"]["gpus"]["p100-spot"] == 0
    assert content["before"]["gpus"] == {}
    used = {job["job"]: (job["types_before"], job["types_after"]) for job in content["jobs"]}
    before, after = (sum(2 * types[at].get("p100", 0.0) for types in used.values()) for at in (0, 1))
    assert after < before and after <= GPUS["p100"] + 1e-6
    assert (
        content["over_time"]["after"]["last_end_seconds"]
        >= content["over_time"]["before"]["last_end_seconds"]
    )


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("onDemandShare=2", "less than or equal to 1"),
        ("mostInOnePool=0", "greater than 0"),
        ("share=0.1", "not permitted"),
        ("nonsense", "--spot"),
    ],
)
def test_limits_of_spot_machines_that_are_none_are_refused(monkeypatch, limits, words):
    serve(monkeypatch, cluster())
    done = CliRunner().invoke(whatif, ["--spot", limits])
    assert done.exit_code == 2
    assert words in done.output
    assert "To fix: " in done.output


MISSING = "there is no namespace nowhere. To fix: kubectl create namespace nowhere"


@pytest.mark.api
@pytest.mark.parametrize(
    "command",
    [
        *[("top", "--once"), ("cost",), ("jobs",), ("demo",), ("ui", "--no-open")],
        *[(name, "job") for name in ("explain", "logs", "suspend", "resume", "delete")],
        ("submit", "--name", "one", "--image", "i", "--steps", "1", "true"),
    ],
    ids=lambda command: command[0],
)
def test_a_namespace_that_does_not_exist_is_named(control_plane, command):
    """In each command that takes one; nothing is installed or started."""
    options = ["--kubeconfig", str(control_plane.kubeconfig), "--namespace", "nowhere"]
    done = CliRunner().invoke(main, [*command, *options])
    assert done.exit_code == 1
    assert MISSING in " ".join(done.output.split())
    assert "Traceback" not in done.output
