"""``ballast explain JOB``: the reason for a job's placement or wait."""

from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import asked, job_argument, kubeconfig_option, namespace_option
from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast_operator.kube.client import Cluster
    from ballast_operator.report.explanation import Explanation


@click.command()
@job_argument
@namespace_option("The job's namespace.", "default")
@kubeconfig_option
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain(job: str, namespace: str, kubeconfig: str | None, output: str) -> None:
    """Explain why JOB runs on its GPUs, or why it waits."""
    found = asked(kubeconfig, lambda cluster: _explained(cluster, job, namespace), namespace=namespace)
    click.echo(found.to_json() if output == "json" else as_text(found))


async def _explained(cluster: "Cluster", job: str, namespace: str) -> "Explanation":
    from ballast_operator.api.meta import is_job_name
    from ballast_operator.errors import NotFound
    from ballast_operator.kube.kinds import JOB
    from ballast_operator.report.explanation import explain_job

    try:
        if is_job_name(job):
            return await explain_job(cluster, namespace, job)
    except NotFound:
        if not await cluster.serves(JOB):
            raise
    raise click.ClickException(
        f"there is no TrainingJob {job!r:.80} in namespace {namespace}. "
        "To fix: see `kubectl get trainingjobs --all-namespaces`"
    )


def _saves(progress: dict[str, Any]) -> str:
    """``, saves every 265 steps, 5 s each``; empty: that is not known."""
    steps, seconds = progress.get("checkpointEverySteps"), progress.get("checkpointSeconds")
    if steps is None:
        return ""
    return f", saves every {steps} steps" + (f", {seconds:.2g} s each" if seconds is not None else "")


def as_text(found: "Explanation") -> str:
    """The explanation as text lines."""
    from ballast_operator.api.job_allocation import LaunchDegrees
    from ballast_operator.api.training_job_status import PlanTrial, allocation_in

    lines = [f"{found.namespace}/{found.job}: {found.state} ({found.reason})", f"  {found.answer}"]
    held, allocation = found.allocation, allocation_in({"allocation": found.allocation})
    if allocation is not None:
        lines.append(
            f"  holds    {' and '.join(map(str, allocation.by_pool))} since {held['since']}, "
            f"launch {allocation.launch}, round {held.get('planId', '-')}"
            + (f"; {allocation.partner} is on its GPU as well" if allocation.partner else "")
        )
        if held.get("degrees"):
            lines.append(f"  planned  {LaunchDegrees.model_validate(held['degrees'])}")
    if found.trial:
        trial = PlanTrial.model_validate(found.trial)
        for number, plan in enumerate(trial.plans):
            goes_on = ", goes on" if number == trial.kept else ""
            lines.append(f"  tried    launch {trial.launch}, {plan}{goes_on}")
    if found.decision.get("chosen"):
        chosen, why = found.decision["chosen"], found.decision.get("why", "")
        lines.append(f"  chosen   {why if why.startswith(chosen) else f'{chosen}: {why}'}")
    if found.decision.get("nextBest"):
        lines.append(f"  second   {found.decision['nextBest']}")
    if found.progress:
        emulated = ", speed emulated" if found.progress.get("emulatedSlowdown") is not None else ""
        speed = found.progress.get("stepsPerSecond")
        at = f" at {speed:.3g} steps/s" if speed is not None else ""
        lines.append(f"  progress step {found.progress.get('step', 0)}{at}{emulated}{_saves(found.progress)}")
    if found.restarts:
        causes = ", ".join(f"{cause} {count}" for cause, count in sorted(found.restarts.items()))
        lines.append(f"  restarts {causes}")
    lines += [
        f"  pod      {pod.name} {'leaving' if pod.leaving else pod.phase} on {pod.node or 'no node yet'}"
        for pod in found.pods
    ]
    lines += [f"  policy   {line}" for line in found.policy if line != found.answer]
    lines += [f"  event    {line}" for line in found.events]
    lines += [f"  not shown {line}" for line in found.left_out]
    return printable("\n".join(lines))
