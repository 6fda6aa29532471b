"""Run as a program with names: a made-up row of each kind is called so, and everything should know it.

A name without a dot is added to Ballast's own rows before anything else is imported; for one with a prefix a
distribution on the path registers ``INSTALLED`` (``test_one_place.py``).
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.allocation.registry import POLICIES
from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.planners.registry import PLANNERS
from ballast_policies.planning.schedules.registry import SCHEDULES

ROWS: dict[str, Any] = {
    "policy": dataclasses.replace(POLICIES["max-min-fairness"], summary="a made-up policy"),
    "schedule": dataclasses.replace(SCHEDULES["ZeroBubbleV"], summary="a made-up schedule"),
    "balancer": dataclasses.replace(BALANCERS["exact"], summary="a made-up balancer", limits_memory=False),
    "planner": dataclasses.replace(PLANNERS["pipeline"], summary="a made-up planner"),
    "dynamic": dataclasses.replace(
        DYNAMICS["freezing"], summary="a made-up case", excludes={"pruning": "made up to"}
    ),
}
INSTALLED = {
    kind: dataclasses.replace(row, summary=f"{row.summary}, installed") for kind, row in ROWS.items()
}
REGISTRIES: dict[str, Any] = {
    "policy": POLICIES,
    "schedule": SCHEDULES,
    "balancer": BALANCERS,
    "planner": PLANNERS,
    "dynamic": DYNAMICS,
}
JOB = {
    "totalSteps": 10,
    "model": {"name": "gpt", "layers": 8, "args": {"dim": 32, "heads": 2, "context": 16}},
    "pipeline": {"maxStages": 2, "microbatches": 4, "globalBatchSize": 4},
    "checkpoint": {"path": "/checkpoints"},
}


def main(name: str) -> dict[str, Any]:
    """What every part of the product makes of the rows called ``name``."""
    from click.testing import CliRunner

    from scripts.generated_files import generated_files

    runner = CliRunner()
    files = generated_files()
    return {
        "definitions": _definitions(files, name),
        "docs": _docs(files, INSTALLED if "." in name else ROWS),
        "operator": _operator(name),
        "trainer": _trainer(name),
        "commands": _commands(runner, name),
    }


def _definitions(files: Mapping[str, str], name: str) -> dict[str, bool]:
    policy = files["crds/ballast.dev_clusterpolicies.yaml"]
    job = files["crds/ballast.dev_trainingjobs.yaml"]
    return {"policy": f"'{name}'" in policy, "job": job.count(f"'{name}'") >= 3}


def _docs(files: Mapping[str, str], rows: Mapping[str, Any]) -> list[str]:
    pages = " ".join(text for path, text in files.items() if path.startswith("docs/"))
    return [kind for kind, row in rows.items() if row.summary in pages]


def _operator(name: str) -> dict[str, Any]:
    from ballast_operator.api.read import InvalidObject, read_cluster_policy, read_training_job

    from tests.operator.api.objects import JOB as FULL
    from tests.operator.api.objects import POLICY, changed

    def refusal(item: Any) -> str:
        try:
            read_training_job(item)
        except InvalidObject as error:
            return str(error)
        return ""

    job = changed(FULL, "spec.pipeline.schedule", name)
    job = changed(changed(job, "spec.rebalance", {"balancer": name}), "spec.dynamics", [_change(name)])
    item = changed(POLICY, "spec.objective", {"policy": name})
    return {
        "policy": read_cluster_policy(item).spec.objective.policy,
        "job": refusal(job),
        "stagesPerRank": refusal(changed(job, "spec.pipeline.stagesPerRank", 3)),
        "memoryBytes": refusal(changed(job, "spec.rebalance", {"balancer": name, "memoryBytes": 10})),
        "mixedPools": refusal(changed(job, "spec.mixedPools", "Allowed")),
        "excluded": refusal(changed(job, "spec.dynamics", [_change(name), _change("pruning")])),
        "unknown": refusal(changed(job, "spec.pipeline.schedule", "2F2B")),
    }


def _change(kind: str) -> dict[str, Any]:
    return {"kind": kind, "startStep": 0, "endStep": 5, "target": 0.5}


def _trainer(name: str) -> dict[str, Any]:
    from ballast_trainer.errors import ConfigurationError
    from ballast_trainer.launch import ValidatedJob

    def refusal(**fields: Any) -> str:
        try:
            ValidatedJob.from_mapping({**JOB, **fields})
        except ConfigurationError as error:
            return str(error)
        return ""

    pipeline = {**JOB["pipeline"], "schedule": name}  # type: ignore[dict-item]
    named = {"pipeline": pipeline, "rebalance": {"balancer": name}, "dynamics": [_change(name)]}
    return {
        "job": refusal(**named),
        "stagesPerRank": refusal(**{**named, "pipeline": {**pipeline, "stagesPerRank": 3}}),
        "memoryBytes": refusal(**{**named, "rebalance": {"balancer": name, "memoryBytes": 10}}),
        "excluded": refusal(**{**named, "dynamics": [_change(name), _change("pruning")]}),
        "tensor": refusal(**{**named, "parallelism": {"tensor": 2}}),
    }


def _commands(runner: Any, name: str) -> dict[str, Any]:
    from ballast_operator.cli.main import main as ballast

    problem = {"gpu_types": ["a"], "capacity": {"a": 1}, "jobs": [{"name": "x", "throughput": {"a": 2.0}}]}
    allocate = ["allocate", "--input", "-", "--output", "json", "--policy"]
    solved = runner.invoke(ballast, [*allocate, name], input=json.dumps(problem))
    unknown = runner.invoke(ballast, [*allocate, "luck"], input=json.dumps(problem))
    Path("profile.yaml").write_text("layers: [{repeat: 8, forwardSeconds: 1, backwardSeconds: 2}]\n")
    Path("cluster.yaml").write_text("gpus: [{type: a, count: 2}]\n")
    planned = runner.invoke(
        ballast,
        ["plan", "profile.yaml", "cluster.yaml", "--planner", name, "--schedule", name, "--output", "json"],
    )
    simulate = ["simulate", "--static", "2", "--seed", "0", "--cluster", "v100=8", "--output", "json"]
    simulated = runner.invoke(ballast, [*simulate, "--policy", name])
    return {
        "allocate": json.loads(solved.stdout)["policy"],
        "unknown": unknown.output,
        "plan": json.loads(planned.stdout)["planner"],
        "simulate": simulated.exit_code,
        "help": [runner.invoke(ballast, [command, "--help"]).output for command in ("allocate", "plan")],
    }


if __name__ == "__main__":
    for called in sys.argv[1:]:
        if "." not in called:
            for kind, registry in REGISTRIES.items():
                registry.builtin[called] = ROWS[kind]
    print(json.dumps({called: main(called) for called in sys.argv[1:]}))
