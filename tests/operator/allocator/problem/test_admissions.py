"""What is kept of one decision for the next is what a fresh one finds, whatever has changed in between."""

import datetime

import pytest
from ballast_operator.allocator.decider import record
from ballast_operator.allocator.problem import admission
from ballast_operator.allocator.problem.admission import Admissions
from ballast_operator.allocator.problem.snapshot import Observed, take_snapshot
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.observation.observer import Observer
from ballast_operator.views import clock as clocks
from ballast_policies.scheduling.measurements import Measurements
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.operator.allocator.problem.test_layer_profiles import a_report
from tests.operator.loops.simulated.simulation import NAMESPACE, job, node, policy
from tests.support.waiting import Clock

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
POOLS = ("fast", "slow")
JOBS = st.sampled_from(["one", "two", "three", "four"])
NODES = st.sampled_from(["n0", "n1", "n2"])

TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}
TEMPLATES = (
    {},
    {"tolerations": [{"key": "team", "operator": "Exists"}]},
    {"nodeSelector": {"zone": "b"}},
)
SPECS = st.fixed_dictionaries(
    {
        "stages": st.sampled_from([(1, 1), (1, 4), (2, 4), (6, 6)]),
        "gpuTypes": st.sampled_from([[], ["fast"], ["none"]]),
        "spot": st.sampled_from(["Allow", "Forbid", "Require"]),
        "extra": st.sampled_from(TEMPLATES),
        "grow": st.booleans(),
        "mixedPools": st.sampled_from(["Never", "Allowed"]),
        "memoryPerGpu": st.sampled_from([None, "10Gi", "40Gi"]),
        "throughput": st.sampled_from([[], [{"gpuType": "fast", "stages": 1, "stepsPerSecond": 0}]]),
    }
)


def as_job(name: str, *, stages, extra, memoryPerGpu, **spec):
    item = job(name, stages=stages, **spec)
    item["spec"]["model"] = {"name": "gpt", "layers": 8}
    item["spec"]["template"] = {
        "spec": {**extra, "containers": [{"name": "trainer", "image": "trainer:1"}]},
    }
    if memoryPerGpu is not None:
        item["spec"]["memoryPerGpu"] = memoryPerGpu
    return item


class Decisions(RuleBasedStateMachine):
    """Jobs, nodes, pools and measurements change; one set of admissions lives through all of it."""

    def __init__(self):
        super().__init__()
        self.clock, self.caches, self.version = Clock(), Caches(), 0
        self.observer = Observer(self.caches, clock=clocks.Clock(seconds=self.clock))
        self.measurements, self.memory = Measurements(), Admissions()
        self.policy = {"memory": None, "spot": False}
        self.items = {}
        for index, pool in enumerate(POOLS):
            self.put(NODE, node(f"n{index}", pool, 4))

    def put(self, kind, item):
        self.version += 1
        name = item["metadata"]["name"]
        known = self.items.get((kind, name), {}).get("metadata", {})
        metadata = {
            "uid": f"{kind.kind}-{name}-{self.version}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **known,
            **item["metadata"],
            "resourceVersion": str(self.version),
        }
        metadata["generation"] = self.version if "uid" not in item["metadata"] else known["generation"]
        self.items[kind, name] = stored = {**item, "metadata": metadata}
        self.caches.watched(kind, "MODIFIED", stored)

    def known(self, kind):
        return sorted(name for of_kind, name in self.items if of_kind is kind)

    @rule(name=JOBS, spec=SPECS)
    def hand_in_or_change(self, name, spec):
        before = self.items.get((JOB, name), {})
        self.put(JOB, {**as_job(name, **spec), "status": before.get("status", {})})

    @precondition(lambda self: self.known(JOB))
    @rule(data=st.data())
    def delete(self, data):
        item = self.items.pop((JOB, data.draw(st.sampled_from(self.known(JOB)))))
        self.caches.watched(JOB, "DELETED", item)

    @precondition(lambda self: self.known(JOB) and self.known(NODE))
    @rule(data=st.data(), ending=st.booleans())
    def launch(self, data, ending):
        name = data.draw(st.sampled_from(self.known(JOB)))
        on = data.draw(st.sampled_from(self.known(NODE)))
        pool = self.items[NODE, on]["metadata"]["labels"]["pool"]
        status = {
            "launches": 1,
            "allocation": {
                "launch": 1,
                "gpuType": pool,
                "pool": pool,
                "gpus": 1,
                "pods": [f"{name}-1-0"],
                "nodes": [on],
                "planId": "p",
                "since": "2026-01-01T00:00:00Z",
            },
        }
        if ending:
            status["allocation"]["ending"] = {"cause": "Preempted", "since": "2026-01-01T00:00:00Z"}
        self.put(JOB, {**self.items[JOB, name], "status": status})

    @precondition(lambda self: self.known(JOB))
    @rule(data=st.data())
    def end_launch(self, data):
        name = data.draw(st.sampled_from(self.known(JOB)))
        self.put(JOB, {**self.items[JOB, name], "status": {"launches": 1}})

    @precondition(lambda self: self.known(JOB))
    @rule(data=st.data(), nodes=st.sets(NODES, min_size=1))
    def avoid(self, data, nodes):
        view = self.observer.job((NAMESPACE, data.draw(st.sampled_from(self.known(JOB)))))
        self.observer.findings.avoid(view, nodes)

    @rule(seconds=st.sampled_from([1.0, 700.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @rule(
        name=NODES,
        pool=st.sampled_from(POOLS),
        gpus=st.sampled_from([0, 1, 4, 8]),
        taints=st.sampled_from([[], [TAINT]]),
        zone=st.sampled_from(["a", "b"]),
        cordoned=st.booleans(),
        spot=st.booleans(),
    )
    def change_node(self, name, pool, gpus, taints, zone, cordoned, spot):
        item = node(name, pool, gpus)
        item["metadata"]["labels"] |= {"zone": zone}
        if spot:
            item["metadata"]["labels"] |= {"karpenter.sh/capacity-type": "spot"}
        item["spec"] = {"taints": taints, "unschedulable": cordoned}
        self.put(NODE, item)

    @precondition(lambda self: self.known(NODE))
    @rule(data=st.data())
    def remove_node(self, data):
        item = self.items.pop((NODE, data.draw(st.sampled_from(self.known(NODE)))))
        self.caches.watched(NODE, "DELETED", item)

    @rule(memory=st.sampled_from([None, "16Gi", "80Gi"]), pools=st.sampled_from([POOLS, POOLS[:1]]))
    def change_policy(self, memory, pools):
        self.policy = {"memory": memory, "pools": pools}

    @precondition(lambda self: self.known(JOB))
    @rule(data=st.data(), gigabytes=st.sampled_from([1, 30]))
    def measure_layers(self, data, gigabytes):
        name = data.draw(st.sampled_from(self.known(JOB)))
        spec = self.observer.job((NAMESPACE, name)).spec
        report = a_report(name, held=[gigabytes * 10**9] * 8, namespace=NAMESPACE, spec=spec)
        record(report, self.measurements)

    @invariant()
    def kept_admissions_are_as_fresh_ones(self):
        item = policy(*self.policy.get("pools", POOLS))
        for pool in item["spec"]["nodePools"]:
            if self.policy["memory"] is not None and pool["name"] == "fast":
                pool["memoryPerGpu"] = self.policy["memory"]
        spec = read_cluster_policy(item).spec
        seen = Observed(
            now=START + datetime.timedelta(seconds=self.clock.now),
            nodes=self.observer.nodes(),
            pods=self.observer.caches[POD].of_no_job(),
            jobs=self.observer.jobs(),
        )
        kept = take_snapshot(spec, seen, self.measurements, self.memory)
        fresh = take_snapshot(spec, seen, self.measurements)
        assert kept == fresh


Decisions.TestCase.settings = settings(Decisions.TestCase.settings, stateful_step_count=20)
TestKeptAdmissions = pytest.mark.slow(Decisions.TestCase)


def test_a_decision_looks_at_the_jobs_that_have_changed_and_no_others(monkeypatch):
    """A hundred jobs wait, one arrives: one is looked at; a node that changes calls for all of them."""
    decisions = Decisions()
    looked_at, original = [], admission._admit_one

    def counted(spec, capacity, view, *others):
        looked_at.append(view.name)
        return original(spec, capacity, view, *others)

    monkeypatch.setattr(admission, "_admit_one", counted)

    def decide():
        looked_at.clear()
        spec = read_cluster_policy(policy(*POOLS)).spec
        observer, measurements = decisions.observer, decisions.measurements
        jobs, nodes = observer.jobs(), observer.nodes()
        seen = Observed(now=START, nodes=nodes, pods=[], jobs=jobs)
        take_snapshot(spec, seen, measurements, decisions.memory)
        return list(looked_at)

    for number in range(100):
        decisions.put(JOB, job(f"job-{number}"))
    assert len(decide()) == 100
    decisions.put(JOB, job("late"))
    assert decide() == ["late"]
    assert decide() == []
    decisions.put(NODE, node("n2", "fast", 8))
    assert len(decide()) == 101
