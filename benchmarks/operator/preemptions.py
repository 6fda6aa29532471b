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
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ballast_localcluster.cluster import LocalCluster
from ballast_operator.demo.run import running_operator
from ballast_operator.kube.client import connect
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_operator_kubeconfig,
)
from ballast_operator.report.costs import read_costs
from kubernetes import config
from kubernetes.dynamic import DynamicClient
from live.trainer_jobs import trainer_job
from spot_market.found import Part
from spot_market.machines import EVERY_STEPS, LIMIT_SECONDS, NODES, Market, machine

ROOT = Path(__file__).resolve().parents[2]


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
