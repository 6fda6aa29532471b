"""A cluster as the caches hold it: pools, jobs in every state, and whoever looks at them."""

import datetime
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ballast_operator.history.recent import Recent
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, LEASE, POLICY
from ballast_operator.page.access import Person
from ballast_operator.page.server import Page
from ballast_policies.contract.messages import REPORT_ANNOTATION

NOW = 1_900_000_000.0

HOSTILE = "<script>alert(1)</script>\u202egnp.\"'&\N{SKULL}{{ 7*7 }}"

_versions = itertools.count(1)


def time_of(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(NOW + seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def condition(kind: str, status: str, reason: str, message: str = "so it is") -> dict[str, Any]:
    at = time_of(-60)
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at}


def runs(
    pool: str = "fast", *, gpus: int = 2, launch: int = 1, since: float = -600, step: int = 10, **more: Any
) -> dict[str, Any]:
    """The status of a job that trains."""
    return {
        "state": "Running",
        "conditions": [
            condition("Admitted", "True", "Assigned"),
            condition("Running", "True", "AllRanksTrain"),
        ],
        "allocation": {
            "pool": pool,
            "gpuType": "v100",
            "gpus": gpus,
            "since": time_of(since),
            "launch": launch,
            "pods": [f"pod-{number}" for number in range(gpus)],
            "nodes": [f"node-{number}" for number in range(gpus)],
        },
        "launches": launch,
        "progress": {"step": step, "stepsPerSecond": 2.0, "loss": 1.0 / (1 + step)},
        "lastDecision": {
            "planId": "round-1",
            "chosen": f"{gpus} x v100",
            "nextBest": f"{gpus} x k80: 1 steps/s",
            "why": "its share is 57 %",
        },
        "costSoFar": 12.5,
        "costAt": time_of(-30),
        "poolCosts": [
            {"pool": pool, "gpuType": "v100", "gpuSeconds": 3600.0, "cost": 12.5, "startupCost": 1.5}
        ],
        **more,
    }


def waits(reason: str = "WaitingForCapacity", message: str = "0 of 4 free", **more: Any) -> dict[str, Any]:
    """The status of a job that waits."""
    return {"state": "Waiting", "conditions": [condition("Admitted", "False", reason, message)], **more}


class World:
    """Caches, what is kept of them, and a page."""

    def __init__(self, access: Any = None) -> None:
        self.now = NOW
        self.caches = Caches()
        self.recent = Recent(self.caches, clock=lambda: self.now)
        self.access = access if access is not None else Everybody()
        self.page = Page(self.recent, self.access)

    def job(self, namespace: str, name: str, status: Mapping[str, Any], **spec: Any) -> None:
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "resourceVersion": str(next(_versions)),
            "creationTimestamp": time_of(-900),
        }
        item = {"metadata": metadata, "spec": {"totalSteps": 100, **spec}, "status": status}
        self.caches.wrote(JOB, item)

    def delete(self, namespace: str, name: str) -> None:
        item = self.caches[JOB].get((namespace, name))
        assert item is not None
        self.caches.watched(JOB, "DELETED", item)

    def report(
        self, namespace: str, name: str, stages: Iterable[tuple[int, int, int]], step: int = 1
    ) -> None:
        rows = [{"rank": r, "firstLayer": f, "endLayer": e} for r, f, e in stages]
        text = json.dumps({"epoch": 1, "step": step, "loss": 1.0, "stepsPerSecond": 1.0, "stages": rows})
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": f"lease-{name}",
            "resourceVersion": str(next(_versions)),
            "annotations": {REPORT_ANNOTATION: text},
        }
        self.caches.wrote(LEASE, {"metadata": metadata, "spec": {}})

    def policy(
        self,
        *,
        held: int | Mapping[str, int] = 2,
        round_: str = "round-1",
        pools: Iterable[str] = ("fast",),
        **more: Any,
    ) -> None:
        names = list(pools)
        taken = held if isinstance(held, Mapping) else dict.fromkeys(names, held)
        status = {
            "conditions": [condition("Ready", "True", "InForce", "rounds of 360 s")],
            "gpus": 8 * len(names),
            "capacity": [
                {
                    "pool": name,
                    "gpuType": "v100",
                    "capacityType": "spot",
                    "nodes": 2,
                    "gpus": 8,
                    "gpusHeld": taken[name],
                }
                for name in names
            ],
            "bill": [
                {
                    "pool": name,
                    "gpuType": "v100",
                    "since": time_of(-900),
                    "gpus": 8,
                    "gpusHeld": taken[name],
                    "pricePerGpuHour": 2.5,
                    "cost": 30.0,
                    "heldCost": 12.5,
                }
                for name in names
            ],
            "billAt": time_of(-30),
            "hazard": [{"pool": names[0], "perHour": 0.04, "perHourLow": 0.01, "perHourHigh": 0.2}],
            "lastRound": {
                "planId": round_,
                "time": time_of(-60),
                "policy": "max-min-fairness",
                "solveSeconds": 0.01,
                "objectiveValue": 0.5,
                "gap": 0.02,
            },
            **more.pop("status", {}),
        }
        metadata = {"name": "default", "uid": "policy", "resourceVersion": str(next(_versions))}
        pools_of = [{"name": name, "gpuType": "v100", "pricePerGpuHour": 2.5} for name in names]
        self.caches.wrote(
            POLICY, {"metadata": metadata, "spec": {"nodePools": pools_of, **more}, "status": status}
        )


class Everybody:
    """Lets the token "good" in, with the namespaces that it is given; None: all."""

    def __init__(self, namespaces: Iterable[str] | None = None, *, policies: bool = True) -> None:
        self._namespaces = None if namespaces is None else frozenset(namespaces)
        self._policies = policies

    async def person(self, token: str) -> Person | None:
        return Person(name="ann") if token == "good" else None

    async def namespaces(self, person: Person, there_are: Iterable[str]) -> frozenset[str]:
        found = frozenset(there_are)
        return found if self._namespaces is None else found & self._namespaces

    def waits_for(self, person: Person) -> int:
        return 0

    async def sees_policies(self, person: Person) -> bool:
        return self._policies
