"""No silent wait: log, metric, health pages and conditions say what for, since when, and what to change."""

import asyncio
import errno
import itertools
import logging
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import aiohttp
import kopf
import pytest
from ballast_operator import handlers
from ballast_operator.app import serve
from ballast_operator.errors import Forbidden, NotFound, Rejected, Unavailable
from ballast_operator.kube import informers
from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.informers import resync
from ballast_operator.kube.kinds import JOB, LEASE, NAMESPACE, POD, POLICY
from ballast_operator.kube.leadership import Leadership
from ballast_operator.metrics import Metrics
from ballast_operator.settings import LeaderSettings
from ballast_operator.waits import FORGOTTEN_AFTER_SECONDS, WaitReason, Waits

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.simulation import Simulation
from tests.operator.loops.simulated.world import World
from tests.support.ports import loopbacks
from tests.support.waiting import Clock


def leadership(cluster: FakeCluster, waits: Waits) -> Leadership:
    return Leadership(cluster, namespace="n", identity="one", settings=LeaderSettings(), waits=waits)


def refusing(cluster: FakeCluster, verb: str, error: Exception) -> FakeCluster:
    async def refuse(*_, **__):
        raise error

    setattr(cluster, verb, refuse)
    return cluster


def test_a_wait_is_logged_after_ten_seconds_and_more_rarely_the_longer_it_lasts(caplog):
    """What, since when, and what to change; not once a second."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    waits = Waits(clock)
    logged = []
    for second in range(3601):
        clock.now = float(second)
        waits.begin(WaitReason.NAMESPACE, "there is no namespace x", to_fix="kubectl create namespace x")
        waits.log_due()
        if caplog.messages:
            logged.append(second)
            caplog.clear()
    assert logged[:6] == [10, 20, 40, 80, 160, 320]
    assert all(later - earlier <= 300 for earlier, later in itertools.pairwise(logged))
    waits.log_due()
    (line,) = waits.lines()
    assert line.startswith("waiting (Namespace) since ")
    assert line.endswith("3600 s: there is no namespace x. To fix: kubectl create namespace x")
    waits.end(WaitReason.NAMESPACE)
    assert caplog.messages == ["no longer waiting after 3600 s: there is no namespace x"]
    assert waits.lines() == []


def test_a_short_wait_is_not_logged(caplog):
    """Ordinary hand-overs make no noise."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    waits = Waits(clock)
    waits.begin(WaitReason.CACHES, "lists")
    clock.now = 9.0
    waits.log_due()
    waits.end(WaitReason.CACHES)
    assert caplog.messages == []


def test_the_metric_has_the_longest_wait_of_each_reason():
    """Two rights may be lacking at once."""
    clock = Clock()
    waits = Waits(clock)
    waits.begin(WaitReason.PERMISSION, "list pods", subject="list pods")
    clock.now = 5.0
    waits.begin(WaitReason.PERMISSION, "list nodes", subject="list nodes")
    clock.now = 7.0
    assert waits.seconds(WaitReason.PERMISSION) == 7.0
    waits.end(WaitReason.PERMISSION, "list pods")
    assert waits.seconds(WaitReason.PERMISSION) == 2.0
    assert waits.seconds(WaitReason.LEADER) == 0.0


def test_a_right_that_is_no_longer_needed_is_forgotten():
    """No one asks again for what a deleted job needed: that must not keep the replica from being ready."""
    clock = Clock()
    waits = Waits(clock)
    waits.begin(WaitReason.PERMISSION, "create pods", subject="post pods")
    assert not waits.ready
    clock.now = FORGOTTEN_AFTER_SECONDS + 1
    waits.log_due()
    assert waits.ready


@pytest.mark.parametrize("reason", WaitReason)
def test_only_a_standby_and_a_missing_policy_leave_a_replica_ready(reason):
    """Else a rolling update would wait for the old leader, and `helm install --wait` for a policy."""
    waits = Waits()
    waits.begin(reason, "something")
    assert waits.ready == (reason in (WaitReason.LEADER, WaitReason.POLICY))


async def test_a_missing_namespace_of_the_lease_is_named():
    """It is waited for, and named with the command that makes it; when it is there, the replica leads."""
    waits, cluster = Waits(), FakeCluster(World())
    create = cluster.create
    replica = leadership(refusing(cluster, "create", NotFound('namespaces "n" not found')), waits)
    assert not await replica.attempt()
    (line,) = waits.lines()
    assert "there is no namespace n" in line
    assert "To fix: kubectl create namespace n, or choose another one with --lease-namespace" in line
    cluster.create = create
    assert await replica.attempt()
    assert waits.lines() == []


async def test_a_standby_says_who_leads():
    """With the Lease and its last renewal."""
    world, waits = World(), Waits()
    first = Leadership(FakeCluster(world), namespace="n", identity="first", settings=LeaderSettings())
    await first.attempt()
    assert not await leadership(FakeCluster(world), waits).attempt()
    (line,) = waits.lines()
    assert "first leads" in line and "lease n/ballast-operator" in line
    assert waits.ready


@pytest.mark.parametrize(
    ("verb", "error", "said"),
    [
        ("create", Rejected("leases is forbidden: because it is being terminated"), "being terminated"),
        ("get", Unavailable("HTTP 503"), ""),
        ("get", Forbidden("cannot get resource"), ""),
    ],
    ids=["a namespace that is being deleted", "no answer", "no right"],
)
async def test_a_lease_that_cannot_be_read_or_made_does_not_end_the_replica(verb, error, said):
    """It tries again; what the client's own record does not say is named."""
    waits, cluster = Waits(), FakeCluster(World())
    assert not await leadership(refusing(cluster, verb, error), waits).attempt()
    assert [said in line for line in waits.lines()] == [True] * bool(said)


async def test_missing_definitions_are_named_and_the_other_kinds_are_listed():
    """One kind that the API server does not know hides no other."""
    world, waits, caches = World(), Waits(), Caches()
    world.put(POD, {"metadata": {"namespace": "a", "name": "pod"}})
    cluster = FakeCluster(world)
    whole = cluster.list

    async def without_jobs(kind, **arguments):
        if kind is JOB:
            raise NotFound("the server could not find the requested resource")
        return await whole(kind, **arguments)

    cluster.list = without_jobs
    assert len(await resync(caches, cluster, "", waits)) == 1
    assert len(caches[POD]) == 1
    (line,) = waits.lines()
    assert "does not know trainingjobs of ballast.dev/v1alpha1" in line
    assert "ballast crds --output-dir - | kubectl apply" in line
    cluster.list = whole
    assert await resync(caches, cluster, "", waits) == {}
    assert waits.lines() == []


async def test_while_one_kind_is_refused_the_others_are_not_listed_again(monkeypatch):
    """An API server that fails for minutes has enough to do."""
    monkeypatch.setattr(informers, "FIRST_PAUSE_SECONDS", 0.0)
    cluster, listed = FakeCluster(World()), []
    whole = cluster.list

    async def failing(kind, **arguments):
        listed.append(kind)
        if kind is JOB and listed.count(JOB) < 5:
            raise Unavailable("HTTP 500")
        return await whole(kind, **arguments)

    cluster.list = failing
    waits = Waits()
    await informers.list_until_complete(Caches(), cluster, "", waits, what="first")
    assert {kind: listed.count(kind) for kind in WATCHED} == {**dict.fromkeys(WATCHED, 1), JOB: 5}
    assert waits.lines() == []


async def test_a_namespace_to_look_after_that_does_not_exist_is_named_until_it_does():
    """Its lists are empty and no error, so it is asked for."""
    world, waits = World(), Waits()
    cluster = FakeCluster(world)
    assert await resync(Caches(), cluster, "research", waits) == {}
    (line,) = waits.lines()
    assert "the namespace research of the jobs does not exist" in line
    assert "kubectl create namespace research" in line
    assert not waits.ready
    world.put(NAMESPACE, {"metadata": {"name": "research"}})
    await resync(Caches(), cluster, "research", waits)
    assert waits.lines() == []


async def test_an_account_that_may_not_read_namespaces_is_not_stopped_by_it():
    """Roles that an administrator wrote before this right was asked for still work."""
    waits, cluster = Waits(), refusing(FakeCluster(World()), "get", Forbidden("namespaces"))
    assert await resync(Caches(), cluster, "research", waits) == {}
    assert waits.lines() == []


async def test_an_operator_records_that_no_process_starts_that_plans():
    """Until one does."""
    from ballast_operator.allocator.solver import Solver
    from ballast_operator.app import Operator, Options
    from ballast_operator.settings import Settings, SolverSettings

    operator = Operator(Options(), Settings())
    async with Solver(SolverSettings(), command=("/no/such/program",)) as none:
        with pytest.raises(OSError, match="no process starts"):
            await operator._plan(none, "one", "{}")
    (line,) = operator.waits.lines()
    assert line.startswith("waiting (Planner)") and "/no/such/program" in line and not operator.waits.ready
    async with Solver(SolverSettings()) as starts:
        spec, problem = await operator._plan(starts, "one", "{}")
    assert spec is None and problem and operator.waits.ready


async def test_an_operator_records_answers_of_the_api_server():
    """No answer, then a missing right, then the right; then a definition of another release."""
    from ballast_operator.app import Operator, Options
    from ballast_operator.settings import Settings

    operator = Operator(Options(), Settings())
    operator._answered("get", LEASE, Unavailable("HTTP 503"))
    assert "the API server does not answer: HTTP 503" in operator.waits.lines()[0]
    operator._answered("list", POD, Forbidden('User "x" cannot list resource "pods"'))
    (line,) = operator.waits.lines()
    assert "(Permission)" in line and 'cannot list resource "pods"' in line
    operator._answered("list", POD, None)
    assert operator.waits.lines() == []
    operator._dropped(JOB, ["status.plan"])
    (line,) = operator.waits.lines()
    assert (
        "keeps no status.plan of trainingjobs" in line
        and "ballast crds --output-dir - | kubectl apply" in line
    )
    assert not operator.waits.ready
    operator._dropped(JOB, [])
    assert operator.waits.lines() == []


async def test_a_missing_policy_is_waited_for_by_the_operator_and_by_its_jobs():
    """The operator's record and the jobs' conditions; both end with the policy."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    policy = simulation.policy()
    simulation.world.drop(POLICY, "", "default")
    simulation.add_job("one")
    await simulation.tick()
    (line,) = simulation.waits.lines()
    assert "(Policy)" in line and "there is no ClusterPolicy. To fix: create one" in line
    assert simulation.status("one").condition("Admitted").reason == "WaitingForPolicy"
    simulation.world.put(POLICY, policy)
    await simulation.tick()
    assert simulation.waits.lines() == []


async def test_a_right_that_the_operator_lacks_is_a_condition_of_the_job_and_no_failure_of_it():
    """The job says what is lacking, waits longer than any backoff would, and runs once the right is there."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("one", backoffLimit=0)
    create = simulation.cluster.create

    async def no_pods(kind, body):
        if kind is POD:
            raise Forbidden('User "ballast" cannot create resource "pods"')
        return await create(kind, body)

    simulation.cluster.create = no_pods
    await simulation.ticks(60)
    condition = simulation.status("one").condition("Reconciled")
    assert not condition.is_true and 'cannot create resource "pods". To fix: grant' in condition.message
    assert condition.message in simulation.explained("one")
    assert simulation.state("one") == "Starting"
    simulation.cluster.create = create
    await simulation.running("one")
    assert simulation.status("one").is_true("Reconciled")


async def test_a_right_that_the_operator_lacks_while_a_gang_trains_is_a_condition_of_the_job():
    """The pods that a repack has released stay until the right is there; the gang trains on meanwhile."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    delete = simulation.cluster.delete

    async def no_deletion(kind, *args, **how):
        raise Forbidden('User "ballast" cannot delete resource "pods"')

    simulation.cluster.delete = no_deletion
    simulation.add_job("one", totalSteps=100_000, trainer={"shrink_at": 20})
    await simulation.until(lambda: simulation.condition("one", "Reconciled") is not None)
    condition = simulation.condition("one", "Reconciled")
    assert (condition.is_true, condition.reason) == (False, "ActionRefused")
    assert 'cannot delete resource "pods". To fix: grant' in condition.message
    assert condition.message in simulation.explained("one")
    simulation.cluster.delete = delete
    await simulation.running("one")
    assert (simulation.status("one").launches, len(simulation.pods("one"))) == (1, 1)


@pytest.mark.parametrize(("reason", "fails"), [(WaitReason.DECISIONS, True), (WaitReason.LEADER, False)])
async def test_kopfs_probe_fails_where_the_health_page_does(reason, fails):
    """Decisions that fail may succeed after a restart; a standby has nothing to restart for."""
    waits = Waits()
    waits.begin(reason, "what is waited for")
    operator = SimpleNamespace(problems=lambda: [], waits=waits)
    memo = kopf.Memo(operator=operator, running=asyncio.get_running_loop().create_future())
    runner, port = await serve(host="127.0.0.1", port=0, metrics=Metrics(), problems=lambda: [], waits=waits)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/healthz") as page,
        ):
            assert page.status == (503 if fails else 200)
    finally:
        await runner.cleanup()
    with pytest.raises(kopf.PermanentError, match="what is waited for") if fails else nullcontext():
        assert "what is waited for" in handlers.waiting(memo)[0]


async def test_it_is_served_at_addresses_of_both_families(monkeypatch):
    """A kubelet of an IPv6 cluster asks at a pod's IPv6 address; IPv6 may be switched off, too."""
    for host in loopbacks():
        runner, port = await serve(host="", port=0, metrics=Metrics(), problems=lambda: [], waits=Waits())
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{host}:{port}/healthz") as page,
            ):
                assert page.status == 200
        finally:
            await runner.cleanup()
    create = socket.create_server

    def without_ipv6(address, *, family=socket.AF_INET, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    runner, port = await serve(host="", port=0, metrics=Metrics(), problems=lambda: [], waits=Waits())
    assert runner.addresses == [("0.0.0.0", port)]
    await runner.cleanup()


async def test_health_fails_while_decisions_fail_and_readiness_while_anything_is_waited_for():
    """A restart may help against the former, and against no other wait."""
    waits = Waits()
    runner, port = await serve(host="127.0.0.1", port=0, metrics=Metrics(), problems=lambda: [], waits=waits)
    try:
        async with aiohttp.ClientSession() as session:

            async def page(name: str) -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{port}/{name}") as answer:
                    return answer.status, await answer.text()

            assert (await page("readyz"))[0] == 200
            waits.begin(WaitReason.CACHES, "lists")
            status, text = await page("readyz")
            assert status == 503 and "lists" in text
            assert (await page("healthz"))[0] == 200
            waits.begin(WaitReason.DECISIONS, "the last 2 decisions failed: KeyError")
            status, text = await page("healthz")
            assert status == 503 and "the last 2 decisions failed" in text
            waits.end(WaitReason.DECISIONS)
            assert (await page("healthz"))[0] == 200
    finally:
        await runner.cleanup()
