"""The program of the comparison's pods in place of ``ballast-train pod``: all of it but the training.

It speaks the trainer's own channel (plan, Lease, reports, acknowledgements), saves, stops, resumes and ends
with the contract's exit codes; a step is the passing of time, at the rate that ``BALLAST_LIVE_RATES`` (JSON:
GPU type -> steps/s) gives for the plan's GPU type. Ranks other than 0 wait for rank 0's word in the folder of
the checkpoints, as trainers wait for each other in their process group.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from ballast_client.api_server import ApiServer
from ballast_policies.contract.messages import Ack, ExitReason, Report
from ballast_policies.contract.plan import Directive, Plan
from ballast_trainer.channel.base import Messages, OperatorChannel
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.channel.kubernetes import WatchingKubernetes
from ballast_trainer.process_exit import end

PLAN_POLL_SECONDS = 0.2
LOOK_SECONDS = 0.05
REPORT_SECONDS = 1.0


class Job:
    """The job's folder: steps done, what happened when, and how a launch ended."""

    def __init__(self, folder: Path, launch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / "state.json"
        self._ended = folder / f"launch-{launch}.ended"
        self._events = folder / "events.jsonl"
        self._launch = launch

    def steps(self) -> float:
        """Steps done so far."""
        return float(json.loads(self._state.read_text())["steps"]) if self._state.exists() else 0.0

    def save(self, steps: float) -> None:
        """Keep the steps done, or the old number."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps({"steps": steps}))
        fresh.replace(self._state)

    def note(self, event: str, **more: object) -> None:
        """Write down what has happened, and when (Unix seconds)."""
        entry = {"event": event, "launch": self._launch, "time": time.time(), **more}
        with self._events.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def end_launch(self, reason: ExitReason) -> None:
        """Tell the other ranks."""
        fresh = self._ended.with_suffix(".new")
        fresh.write_text(reason)
        fresh.replace(self._ended)

    def launch_ended(self) -> ExitReason | None:
        """Exit reason by rank 0, if there is one."""
        return ExitReason(self._ended.read_text()) if self._ended.exists() else None


def follow(job: Job, told: list[int]) -> ExitReason:
    """A rank that is not the first: until rank 0 has ended the launch."""
    while True:
        reason = job.launch_ended()
        if reason is not None:
            return reason
        if told:
            return ExitReason.STOPPED
        time.sleep(LOOK_SECONDS)


def lead(job: Job, total: int, told: list[int]) -> ExitReason:
    """Rank 0: take the plan, let the steps pass, stop when told."""
    job.note("started")
    api = ApiServer.from_environment(os.environ)
    pod = os.environ["BALLAST_POD_NAME"]
    namespace, name = os.environ["BALLAST_NAMESPACE"], os.environ["BALLAST_JOB"]
    channel = OperatorChannel(WatchingKubernetes(api, namespace=namespace, job=name, pod=pod))
    plan = _wait_for_plan(channel, pod, told)
    if plan is None:
        return ExitReason.STOPPED
    gpu_type = plan.ranks[0].gpu_type
    rate = float(json.loads(os.environ["BALLAST_LIVE_RATES"])[gpu_type])
    first = job.steps()
    began = time.monotonic()
    job.note("training", gpuType=gpu_type, steps=first)
    channel_thread = ChannelThread(channel, plan)
    ack = Ack(epoch=plan.epoch, step=int(first))
    channel_thread.send(Messages(ack=ack, report=_report(plan, first, None, first)))
    reported = began
    while True:
        now = time.monotonic()
        done = min(float(total), first + rate * (now - began))
        if done >= total:
            job.save(done)
            job.note("finished", steps=done)
            channel_thread.close(finished_step=total)
            return ExitReason.FINISHED
        newest = channel_thread.plan()
        if told or newest.directive is Directive.CHECKPOINT_AND_STOP:
            job.save(done)
            job.note("stopped", steps=done)
            report = _report(newest, done, rate, first)
            ack = Ack(epoch=newest.epoch, step=int(done), checkpoint_step=int(done))
            channel_thread.send(Messages(ack=ack, report=report))
            channel_thread.close()
            return ExitReason.STOPPED
        if now - reported >= REPORT_SECONDS:
            channel_thread.send(Messages(report=_report(newest, done, rate, first)), now=False)
            reported = now
        time.sleep(min(LOOK_SECONDS, (total - done) / rate))


def _report(plan: Plan, steps: float, rate: float | None, first: float) -> Report:
    resumed = int(first) or None
    return Report(
        epoch=plan.epoch, step=int(steps), loss=None, steps_per_second=rate, resumed_from_step=resumed
    )


def _wait_for_plan(channel: OperatorChannel, pod: str, told: list[int]) -> Plan | None:
    while not told:
        plan = channel.read_plan()
        if plan is not None and plan.rank_of(pod) is not None:
            return None if plan.directive is Directive.CHECKPOINT_AND_STOP else plan
        time.sleep(PLAN_POLL_SECONDS)
    return None


def main() -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    _, launch, rank = os.environ["BALLAST_POD_NAME"].rsplit("-", 2)
    job = Job(Path(os.environ["BALLAST_CHECKPOINT_PATH"]), int(launch))
    if rank == "0":
        reason = lead(job, int(os.environ["BALLAST_LIVE_STEPS"]), told)
        job.end_launch(reason)
    else:
        reason = follow(job, told)
    log = Path(os.environ["BALLAST_TERMINATION_LOG"])
    return int(end(reason, "emulated training", log=log if log.exists() else None))


if __name__ == "__main__":
    sys.exit(main())
