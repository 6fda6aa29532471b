"""Spot machines that are taken away one after the other: is a job lost, a step done twice, a dollar missing?

    python benchmarks/operator/preemptions.py                     # 50 preemptions, seed 0, some ten minutes
    python benchmarks/operator/preemptions.py --preemptions 5 --seed 3 --output preemptions.json
    python benchmarks/operator/preemptions.py --folder DIR --minutes 8   # a part; again while it exits with 3

In parts: when the time is up the jobs are suspended, and save; the next part has a cluster of its own, in
which they resume from the same checkpoints. What each part has found is in DIR/preemptions.json, and the
figures are the sum of all. The exit status is 3 while preemptions are left.

Real: API server, controllers, kube-scheduler, node agents, the operator, and trainers that train on the CPU
as if it were slower GPUs. Two jobs, one elastic and one of a fixed size, share four spot machines. At random
moments one of these is taken: with a notice of 120 s (AWS) or 30 s (Google Cloud), or, one time in five,
without any: then the agent and its pods are killed. A machine with a notice is killed at its deadline, if
pods are still on it. Then another one comes in its place. At the end each job has to finish.

The bill of the machines, less their idle time, is what the jobs have paid.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.nodes.node import ProcessNode
from ballast_operator.demo.run import running_operator
from ballast_operator.install import install_objects
from ballast_operator.kube.client import connect
from ballast_operator.local_operator import OPERATOR_NAMESPACE, apply_objects, write_operator_kubeconfig
from ballast_operator.report.costs import read_costs
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from live.trainer_jobs import WHERE, trainer_job

NOTICES = {
    "aws-node-termination-handler/spot-itn": 120.0,
    "cloud.google.com/impending-node-termination": 30.0,
}
POWER_LOSS = 0.2
"""Part of the preemptions that come without a notice."""

NODES = tuple(f"spot-{number}" for number in range(4))
EVERY_STEPS = 20
LIMIT_SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]


def machine(name: str) -> ProcessNode:
    slowdown = {"default": 8.0}
    return ProcessNode(name=name, gpus=1, pool="spot", capacity_type="spot", slowdown=slowdown)


def policy() -> dict[str, Any]:
    pool = {"name": "spot", "nodeSelector": {"ballast.dev/pool": "spot"}, "gpuType": "v100"}
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "default"},
        "spec": {"roundSeconds": 15, "nodePools": [{**pool, "pricePerGpuHour": 3.6}]},
    }


def job(name: str, folder: Path, *, steps: int, stages: tuple[int, int]) -> dict[str, Any]:
    return trainer_job(
        name,
        folder,
        steps=steps,
        model={"name": "recurrent", "layers": 8, "args": {"dim": 48}},
        pipeline={
            "minStages": stages[0],
            "maxStages": stages[1],
            "microbatches": 6,
            "globalBatchSize": 12,
        },
        save_every=EVERY_STEPS,
        backoffLimit=0,
    )


@dataclasses.dataclass
class Part:
    """What was found so far, over all parts.

    Attributes:
        taken: how machines were taken -> how often.
        jobs: job -> its counts, summed up.
        steps: job -> the step that it has saved.
        paid: bill, what jobs have paid, idle; summed up.
        parts: clusters that there were.
        done: all preemptions were played, and the jobs were told to end.
        succeeded: whether they have.
    """

    taken: Counter[str] = dataclasses.field(default_factory=Counter)
    jobs: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    paid: dict[str, float] = dataclasses.field(default_factory=dict)
    parts: int = 0
    done: bool = False
    succeeded: bool = False

    @classmethod
    def read(cls, file: Path) -> "Part":
        """As it was written; the first part begins with nothing."""
        if not file.exists():
            return cls()
        known = json.loads(file.read_text())
        return cls(
            taken=Counter(known["taken"]),
            jobs={name: Counter(counts) for name, counts in known["jobs"].items()},
            steps=known["steps"],
            paid=known["paid"],
            parts=known["parts"],
            done=known["done"],
            succeeded=known["succeeded"],
        )

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        jobs = {name: dict(counts) for name, counts in self.jobs.items()}
        return {**vars(self), "taken": dict(self.taken), "jobs": jobs}

    @property
    def number(self) -> int:
        """Preemptions so far; "not left in time" is one of a notice."""
        return sum(count for how, count in self.taken.items() if how != "not left in time")

    def add_job(self, name: str, status: dict[str, Any], first_step: int | None) -> None:
        """Add what a part's status says; ``first_step``: the first that was reported, None: none was."""
        counts = self.jobs.setdefault(name, Counter())
        counts["launches"] += status.get("launches") or 0
        counts["live_shrinks"] += sum(entry["asked"] for entry in status.get("repacks") or [])
        saved = self.steps.get(name, 0)
        again = 0 if first_step is None else max(0, saved - first_step)
        counts["steps_lost"] += status.get("lostSteps", 0) + again
        for cause, times in (status.get("restarts") or {}).items():
            counts[f"restarts.{cause}"] += times
        self.steps[name] = max(saved, (status.get("progress") or {}).get("step") or 0)

    def figures(self) -> dict[str, Any]:
        """What is printed."""
        return {
            "preemptions": dict(self.taken),
            "parts": self.parts,
            "all_jobs_succeeded": self.succeeded,
            "jobs": {
                name: {
                    "launches": counts["launches"],
                    "restarts": {
                        cause.partition(".")[2]: times
                        for cause, times in sorted(counts.items())
                        if cause.startswith("restarts.")
                    },
                    "live_shrinks": counts["live_shrinks"],
                    "steps_lost": counts["steps_lost"],
                }
                for name, counts in self.jobs.items()
            },
            "bill": self.paid.get("bill", 0.0),
            "jobs_cost": self.paid.get("jobs", 0.0),
            "idle": self.paid.get("idle", 0.0),
            "unaccounted": self.paid.get("bill", 0.0)
            - self.paid.get("jobs", 0.0)
            - self.paid.get("idle", 0.0),
        }


@dataclasses.dataclass
class Market:
    """The cluster, and what is taken from it."""

    cluster: LocalCluster
    api: Any
    random: random.Random
    taken: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)

    def status(self, name: str) -> dict[str, Any]:
        """The job's status."""
        found = self.custom.get_namespaced_custom_object(name=name, **WHERE).get("status") or {}
        step = (found.get("progress") or {}).get("step")
        if step is not None:
            self.first.setdefault(name, step)
        return found

    def pods_on(self, node: str) -> int:
        """Pods that run or start there."""
        pods = self.core.list_namespaced_pod("default", field_selector=f"spec.nodeName={node}").items
        return sum(pod.status.phase in ("Pending", "Running") for pod in pods)

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Whether it is reached in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if reached():
                return True
            time.sleep(0.3)
        return False

    def suspend(self, names: list[str]) -> bool:
        """Let the jobs save and hold no machines; whether they do."""
        for name in names:
            self._patch(name, {"suspend": True})
        return self.wait(
            lambda: all(self.status(n).get("state") == "Suspended" for n in names), LIMIT_SECONDS
        )

    def finish(self, names: list[str]) -> None:
        """Let the jobs end soon: a number of steps counts from the next launch on."""
        self.suspend(names)
        for name in names:
            step = (self.status(name).get("progress") or {}).get("step") or 0
            self._patch(name, {"suspend": False, "totalSteps": step + EVERY_STEPS})

    def _patch(self, name: str, spec: dict[str, Any]) -> None:
        self.custom.patch_namespaced_custom_object(name=name, body={"spec": spec}, **WHERE)

    def preempt(self) -> str:
        """Take one machine, in use if there is one; returns what happened."""
        used = [name for name in NODES if self.pods_on(name)]
        name = self.random.choice(used or NODES)
        if self.random.random() < POWER_LOSS:
            self.taken["power loss"] += 1
            self.replace(name)
            return f"{name} loses its power"
        key, seconds = self.random.choice(sorted(NOTICES.items()))
        began = time.monotonic()
        self.taken[f"notice of {seconds:g} s"] += 1
        self.core.patch_node(name, {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}})
        left = self.wait(lambda: not self.pods_on(name), seconds - 1.0)
        text = f"{name} has {seconds:g} s: left after {time.monotonic() - began:.1f} s"
        if not left:
            self.taken["not left in time"] += 1
            text = f"{name} has {seconds:g} s: not left in time"
        if left and self.random.random() < 0.7:  # the next machine is like this one
            self.core.patch_node(name, {"spec": {"taints": []}})
        else:
            self.replace(name)
        return text

    def replace(self, name: str) -> None:
        """The machine is gone, and some time later another one has its name."""
        self.cluster.lose_node(name)
        time.sleep(self.random.uniform(1.0, 4.0))
        self.core.delete_node(name)
        self.cluster.add_node(machine(name))


async def totals(kubeconfig: Path) -> dict[str, Any]:
    async with await connect(str(kubeconfig)) as cluster:
        found: dict[str, Any] = (await read_costs(cluster)).to_dict()["total"]
        return found


def play(part: Part, count: int, seed: int, steps: int, folder: Path, until: float) -> None:
    """Preemptions on a cluster until there were ``count`` in all parts, or it is ``until`` (monotonic)."""
    crds = sorted((ROOT / "crds").glob("*.yaml"))
    part.parts += 1
    with LocalCluster(crds=crds, folder=folder / f"cluster-{part.parts}") as cluster:
        for name in NODES:
            cluster.add_node(machine(name))
        api = config.new_client_from_config(str(cluster.kubeconfig))
        kube = DynamicClient(api)
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        market = Market(cluster, api, random.Random(f"{seed}-{part.parts}"), taken=part.taken)
        kubeconfig = write_operator_kubeconfig(api, cluster.kubeconfig, folder / "operator.kubeconfig")
        jobs = {"elastic": (1, 3), "fixed": (1, 1)}
        manifests = [job(name, folder, steps=steps, stages=sizes) for name, sizes in jobs.items()]
        apply_objects(kube, [policy(), *manifests], namespace="default")
        with running_operator(kubeconfig, folder / f"operator-{part.parts}.log"):
            trains = True
            while trains and part.number < count and time.monotonic() < until:
                trains = market.wait(
                    lambda: any(market.status(name).get("state") == "Running" for name in jobs), LIMIT_SECONDS
                )
                if trains:
                    time.sleep(market.random.uniform(0.0, 3.0))
                    print(f"{part.number + 1}: {market.preempt()}", flush=True)
            # Of each job a step is known, or it has done none in this part.
            market.wait(lambda: all(market.status(name) and name in market.first for name in jobs), 60.0)
            part.done = part.number >= count or not trains
            if part.done:
                market.finish(list(jobs))
                part.succeeded = market.wait(
                    lambda: all(market.status(name).get("state") == "Succeeded" for name in jobs),
                    LIMIT_SECONDS,
                )
            elif not market.suspend(list(jobs)):
                print("not all jobs have saved in time", flush=True)
                part.done = True
            for name in jobs:
                part.add_job(name, market.status(name), market.first.get(name))
            paid = asyncio.run(totals(cluster.kubeconfig))
            part.paid = {name: part.paid.get(name, 0.0) + paid[name] for name in ("bill", "jobs", "idle")}


def main() -> int:
    """Play, print the figures, and return 1 where a job was lost, or more was done twice than may be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preemptions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each job; it is told when to end")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="keep checkpoints and what was found there, and continue")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of a part, the last pauses not counted"
    )
    options = parser.parse_args()
    if options.minutes < math.inf and options.folder is None:
        parser.error("--minutes: the next part has to find what this one leaves. To fix: give --folder")
    began = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ballast-preemptions-"))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "preemptions.json"
    part = Part.read(kept)
    if not part.done:
        until = began + 60.0 * options.minutes
        play(part, options.preemptions, options.seed, options.steps, folder.resolve(), until)
        kept.write_text(json.dumps(part.to_dict(), indent=1) + "\n")
    found = part.figures()
    text = json.dumps(found, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    if not part.done:
        print(f"{options.preemptions - part.number} preemptions are left: run it again with this --folder")
        return 3
    lost = sum(entry["steps_lost"] for entry in found["jobs"].values())
    losses = found["preemptions"].get("power loss", 0) + found["preemptions"].get("not left in time", 0)
    # Without a notice: the steps since the last checkpoint, of each job there. With one: at most one.
    allowed = 2 * EVERY_STEPS * losses + options.preemptions
    accounted = abs(found["unaccounted"]) <= 0.03 * found["bill"]
    return 0 if found["all_jobs_succeeded"] and lost <= allowed and accounted else 1


if __name__ == "__main__":
    sys.exit(main())
