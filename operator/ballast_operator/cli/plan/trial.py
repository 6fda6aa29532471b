"""AMP's last step: the best plans run for a few steps on this machine, and the measured best comes first."""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from ballast_policies.planning.planners.answers import plans_table

_WARM = 2
"""Steps before those that count: buffers, connections and caches are made in them."""

_MOST_SECONDS = 900.0
"""Seconds of one trial; a plan that takes longer has failed."""

_NOT_TRIED = ("checkpoint", "evaluation", "rebalance")
"""Fields of a configuration without which a trial runs: it writes nothing, and keeps its layers."""


def try_plans(
    plans: Sequence[dict[str, Any]], most: int, config: Mapping[str, Any], steps: int
) -> tuple[list[dict[str, Any]], str]:
    """The plans, those measured fastest first, and a table with the measured beside the predicted.

    Of ``plans``, as ``--output json`` has them, the first ``most`` get ``trial``: ``{measuredSeconds}``, the
    median of ``steps``, or ``{reason}``; a refused one is not run. ``config``: a trainer's, which takes
    pipeline, degrees and layers of each plan.

    Raises:
        ClickException: the trainer is not installed, or no plan could be measured.
    """
    if not plans:
        raise click.ClickException("--trial: this planner and schedule list no plans. To fix: --planner best")
    trainer = _trainer()
    tried = [{**plan, "trial": _tried(plan, config, steps, trainer)} for plan in plans[:most]]
    tried.sort(key=lambda plan: plan["trial"].get("measuredSeconds", math.inf))
    reasons = [plan["trial"]["reason"] for plan in tried if "reason" in plan["trial"]]
    if len(reasons) == len(tried):
        raise click.ClickException(f"--trial: none of {len(tried)} plans ran: {reasons[0]}")
    head = ["", "", "Run on this machine, the fastest first:"]
    text = "\n".join([*head, *plans_table(tried), *(f"Not measured: {reason}" for reason in reasons)])
    return [*tried, *plans[most:]], text


def _trainer() -> str:
    beside = Path(sys.executable).with_name("ballast-train")
    found = str(beside) if beside.exists() else shutil.which("ballast-train")
    if found is None:
        raise click.ClickException(
            "--trial: ballast-train is not installed here. To fix: pip install ballast-trainer, or no --trial"
        )
    return found


def _tried(plan: Mapping[str, Any], config: Mapping[str, Any], steps: int, trainer: str) -> dict[str, Any]:
    if plan["refused"] is not None:
        return {"reason": plan["refused"]}
    job = {key: value for key, value in config.items() if key not in _NOT_TRIED}
    for field in ("pipeline", "parallelism", "training"):
        job[field] = {**(config.get(field) or {}), **plan["job"][field]}
    job |= {"plan": {"layers": plan["job"]["plan"]["layers"]}, "totalSteps": steps + _WARM}
    with tempfile.TemporaryDirectory(prefix="ballast-trial-") as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        command = [trainer, "run", "--config", str(path), "--ranks", str(plan["gpus"]), "--log", "json"]
        out, code = _output(command, folder)
    seconds = [
        line["step_seconds"] for line in map(_line, out.splitlines()) if line.get("step_seconds") is not None
    ][_WARM:]
    if code or not seconds:
        last = next((line for line in reversed(out.splitlines()) if line.strip()), "it printed nothing")
        return {"reason": f"ballast-train ended with {code}: {last:.300}"}
    return {"measuredSeconds": statistics.median(seconds), "steps": len(seconds)}


def _output(command: list[str], folder: str) -> tuple[str, int | str]:
    """Printed output, errors included, and exit code; after :data:`_MOST_SECONDS` all ranks are killed."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            return running.communicate(timeout=_MOST_SECONDS)[0], running.returncode
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return running.communicate()[0], f"no result after {_MOST_SECONDS:.0f} s"
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)


def _line(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
