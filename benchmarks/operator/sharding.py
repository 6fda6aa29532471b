"""Past one replica: one cluster cut into shards, a ClusterPolicy each, against one policy over all of it.

    python benchmarks/operator/sharding.py --gpus 100000 --jobs 60000 --shards 1 5 20

For each number of shards: CPU seconds of one decision (allocation and round) of the largest shard, and what
the cut costs in fairness and throughput against one policy over everything. Jobs are dealt at random, by
least demand, or by team (teams are of different sizes: the adversary). Nothing runs: values in, values out.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence

import numpy as np
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, RoundSettings, RoundState

TYPES = {"v100": 1.0, "p100": 0.55, "k80": 0.3, "a100": 2.2}
GPUS_PER_NODE = 8
TEAMS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One shard's decision: its jobs' levels (shares of an equal division), steps/s in all, CPU seconds."""

    levels: np.ndarray
    throughput: float
    seconds: float
    placed: int


def draw_jobs(count: int, rng: np.random.Generator) -> tuple[list[Job], np.ndarray]:
    """(jobs, team of each); teams are of sizes 1/k, and each prefers some GPU types."""
    weights = 1 / np.arange(1, TEAMS + 1)
    teams = rng.choice(TEAMS, size=count, p=weights / weights.sum())
    taste = rng.lognormal(sigma=0.5, size=(TEAMS, len(TYPES)))
    sizes = rng.choice([1, 2, 4, 8], size=count, p=[0.5, 0.2, 0.2, 0.1])
    speeds = rng.lognormal(sigma=0.3, size=(count, len(TYPES))) * taste[teams] * list(TYPES.values())
    return [
        Job(
            name=f"job-{index}",
            gpus=int(sizes[index]),
            throughput=dict(zip(TYPES, (speeds[index] * sizes[index]).tolist(), strict=True)),
        )
        for index in range(count)
    ], teams


def draw_nodes(gpus: int) -> list[Node]:
    """Nodes of all types in turn."""
    kinds = list(TYPES)
    return [
        Node(name=f"node-{index}", pool=kind, gpu_type=kind, gpus=GPUS_PER_NODE)
        for index in range(gpus // GPUS_PER_NODE)
        for kind in [kinds[index % len(kinds)]]
    ]


def deal(
    jobs: Sequence[Job], teams: np.ndarray, shards: int, how: str, rng: np.random.Generator
) -> np.ndarray:
    """The shard of each job."""
    if how == "random":
        return rng.integers(shards, size=len(jobs))
    if how == "by team":
        return teams % shards
    load, found = np.zeros(shards), np.zeros(len(jobs), dtype=int)
    for index, job in enumerate(jobs):  # as they arrive: to the shard with the least demand
        found[index] = load.argmin()
        load[found[index]] += job.gpus
    return found


def decide(jobs: Sequence[Job], nodes: Sequence[Node]) -> Decided:
    """Max-min fair shares of one shard, and the first round."""
    capacity: dict[str, int] = dict.fromkeys(TYPES, 0)
    for node in nodes:
        capacity[node.gpu_type] += node.gpus
    began = time.process_time()
    problem = Problem(gpu_types=tuple(TYPES), capacity=capacity, jobs=tuple(jobs))
    shares = allocate("max-min-fairness", problem).allocation
    round_ = decide_round(
        Question(
            now=0.0,
            shares=shares,
            jobs=jobs,
            nodes=nodes,
            state=RoundState(received={}, promised={}, running={}, running_since={}, moves=()),
            settings=RoundSettings(round_seconds=360.0),
        )
    )
    seconds = time.process_time() - began
    speeds = np.array([sum(x * job.throughput[t] for t, x in shares[job.name].items()) for job in jobs])
    typical = np.array([np.mean([job.throughput[t] for t in TYPES]) for job in jobs])
    sizes = np.array([job.gpus for job in jobs])
    return Decided(
        levels=speeds / typical * sizes,
        throughput=float((speeds / typical).sum()),
        seconds=seconds,
        placed=len(round_.placements),
    )


def run(gpus: int, count: int, shards: int, how: str, seed: int) -> dict[str, float | int | str]:
    """One row."""
    rng = np.random.default_rng(seed)
    jobs, teams = draw_jobs(count, rng)
    nodes = draw_nodes(gpus)
    of_job = deal(jobs, teams, shards, how, rng)
    # Nodes in blocks of all types, so that every shard has the same mix.
    block = np.arange(len(nodes)) // len(TYPES) % shards
    found = []
    for shard in range(shards):
        mine = [job for job, at in zip(jobs, of_job.tolist(), strict=True) if at == shard]
        if mine:
            found.append(
                decide(mine, [n for n, at in zip(nodes, block.tolist(), strict=True) if at == shard])
            )
    levels = np.concatenate([one.levels for one in found])
    return {
        "shards": shards,
        "jobsDealt": how,
        "largestShardJobs": max(len(one.levels) for one in found),
        "decisionCpuSeconds": round(max(one.seconds for one in found), 2),
        "leastLevel": round(float(levels.min()), 4),
        "throughput": round(sum(one.throughput for one in found), 1),
        "placed": sum(one.placed for one in found),
    }


def main() -> None:
    """Print one row for each cut, and the loss against no cut."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=60_000)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    rows = []
    for shards in given.shards:
        for how in ("random", "least demand", "by team") if shards > 1 else ("all in one",):
            kind = "random" if shards == 1 else how
            rows.append({**run(given.gpus, given.jobs, shards, kind, given.seed), "jobsDealt": how})
            if given.output == "table":
                row, first = rows[-1], rows[0]
                level = 1 - float(row["leastLevel"]) / float(first["leastLevel"])
                speed = 1 - float(row["throughput"]) / float(first["throughput"])
                print(
                    f"{row['shards']:3} shards, {how:12}  largest {row['largestShardJobs']:6} jobs  "
                    f"{row['decisionCpuSeconds']:6.2f} CPU-s a decision  least level -{level:6.1%}  "
                    f"throughput -{speed:6.1%}  {row['placed']} placed",
                    flush=True,
                )
    if given.output == "json":
        print(json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
