"""``ballast-train run``: train from a configuration file; alone, with local ranks, or under torchrun."""

import contextlib
import copy
import dataclasses
import faulthandler
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from ballast_policies.contract.messages import RANK_RESTARTS, ExitCode, ExitReason, Rank
from ballast_policies.contract.plan import Directive, Plan

from ballast_trainer.causes import describe, explains_itself
from ballast_trainer.cli.config_file import ASSIGNMENTS, CONFIG, read_config
from ballast_trainer.cli.local_ranks import attempt_prefix, run_local_ranks
from ballast_trainer.distributed.stopping import StopSignal, stop_seconds
from ballast_trainer.environment import DeviceChoice, TorchrunRank
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.process_exit import end, end_on_lost_peer, leave, reason_of
from ballast_trainer.terminal import erasure

logger = logging.getLogger("ballast_trainer.run")

_SAID_ONCE = {ExitReason.CONFIGURATION: ExitCode.USAGE, ExitReason.STOPPED: ExitCode.STOPPED}
"""Ends before the first step that all local ranks share."""


def _local_plan(ranks: int, per_pod: int) -> Plan:
    """All ranks on this machine; with ``gpusPerPod`` in pods, so that a repack releases whole ones.

    Raises:
        ConfigurationError: the ranks do not fill whole pods.
    """
    if ranks > 1 and ranks % per_pod:
        reason = (
            f"{ranks} ranks do not fill pods of {per_pod}. To fix: start {per_pod}, {2 * per_pod}, ... ranks"
        )
        raise ConfigurationError("parallelism.gpusPerPod", reason)
    name = "rank" if per_pod == 1 else "pod"
    members = tuple(
        Rank(
            rank=rank,
            pod=f"{name}-{rank // per_pod}",
            local_rank=rank % per_pod,
            address="127.0.0.1",
            gpu_type="local",
        )
        for rank in range(ranks)
    )
    return Plan(job="local", epoch=1, launch=1, directive=Directive.RUN, ranks=members)


def unpartitioned(config: dict[str, Any]) -> dict[str, Any]:
    """The whole model in one process, the reference for a mesh of ranks; nothing is checked yet."""
    alone = {key: value for key, value in config.items() if key not in ("parallelism", "plan")}
    changes = alone.get("dynamics")
    if isinstance(changes, list):
        # One rank shares its experts with nobody.
        alone["dynamics"] = [
            change | {"experts": {k: v for k, v in change["experts"].items() if k != "parallel"}}
            if isinstance(change, dict) and isinstance(change.get("experts"), dict)
            else change
            for change in changes
        ]
    return alone


def _restarts(config: Mapping[str, Any], *, follows_plans: bool) -> int | None:
    """Number of times that a lost rank is started again; None: no rank goes on without one.

    Not where somebody else plans, or pods are several
    ranks, which would have to come back together.
    """
    checkpoint, parallelism = config.get("checkpoint"), config.get("parallelism")
    if not isinstance(checkpoint, dict) or not checkpoint.get("inMemoryEverySteps"):
        return None
    pods = isinstance(parallelism, dict) and parallelism.get("gpusPerPod", 1) != 1
    return 0 if pods or follows_plans else RANK_RESTARTS


def _open_store(launched: TorchrunRank, stop: StopSignal, seconds: float) -> Any:
    """The store under torchrun (the agent's) or of local ranks, under the attempt's prefix.

    Rank 0 serves that of local ranks, unless these go on without it. ``seconds``: how long the others wait.
    """
    import torch.distributed as dist

    from ballast_trainer.distributed.process_group import reach_store, serve_store

    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or launched.store_outlives
    if launched.rank == 0 and not agent_serves:
        try:
            store = serve_store(launched.address, launched.port, seconds)
        except OSError as error:
            reason = (
                f"rank 0 cannot listen on {launched.address}:{launched.port}: {error}. "
                "To fix: a free port, and MASTER_ADDR of this machine"
            )
            raise ConfigurationError("MASTER_PORT", reason) from error
    else:
        store = reach_store(launched.address, launched.port, seconds, stop)
    # A restarted attempt must not read the addresses that the last one left in the agent's store.
    return dist.PrefixStore(attempt_prefix(), store)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options of the command."""

    log: str
    single_process: bool
    device: str
    channel_folder: Path | None
    trace: Path | None
    trace_step: int


def _run(config: dict[str, Any], options: _Options, log: Path | None) -> int:
    from ballast_client.api_server import ChannelError

    from ballast_trainer.channel.base import Channel, DirectoryChannel, StandaloneChannel
    from ballast_trainer.distributed.joining import Returning, wait_for_growth
    from ballast_trainer.launch import ValidatedJob, train
    from ballast_trainer.loop.rank_launch import RankLaunch, TraceRequest
    from ballast_trainer.reporting.console import JsonReporter, TextReporter

    # Where torch aborts, e.g. on a collective of NCCL that hangs.
    faulthandler.enable(2)
    stop = StopSignal()
    stop.install(interactive=True, seconds=stop_seconds(), overdue=end_on_lost_peer(log))
    if options.single_process:
        config = unpartitioned(config)
    job = ValidatedJob.from_mapping(config)
    launched = TorchrunRank() if options.single_process else TorchrunRank.from_environment(os.environ)
    rank, ranks = launched.rank, launched.ranks
    job.check_ranks(ranks)
    if rank == 0:
        job = job.with_ties()
    plan = _local_plan(ranks, job.config.parallelism.ranks_per_pod)
    process = plan.ranks[rank].process
    store = _open_store(launched, stop, job.config.training.comm_timeout_seconds) if ranks > 1 else None
    if launched.restarts:
        process = f"{process}.{launched.restarts}"
        plan = wait_for_growth(store, process, stop)
    channel: Channel
    if options.channel_folder is None:
        channel = alone = StandaloneChannel(plan)
        if launched.store_outlives:
            alone = channel = StandaloneChannel(plan, Returning(store, job.mesh.column).growth)
        regrouped = alone.follow
    else:
        folder = DirectoryChannel(options.channel_folder)
        if rank == 0:
            try:
                folder.publish(plan)
            except ChannelError as error:
                reason = f"cannot write to {options.channel_folder}: {error}. To fix: name a directory"
                raise ConfigurationError("--channel", reason) from error
        channel, regrouped = folder, folder.publish
    outcome = train(
        job,
        RankLaunch(
            plan=plan,
            process=process,
            channel=channel,
            reporter=JsonReporter() if options.log == "json" else TextReporter(job.config.total_steps),
            stop=stop,
            lost=end_on_lost_peer(log),
            trace=None
            if options.trace is None
            else TraceRequest(path=options.trace, first_step=options.trace_step),
            store=store,
            local_rank=launched.local_rank,
            local_ranks=launched.local_ranks,
            device=DeviceChoice(options.device),
            joining=launched.restarts > 0,
            regrouped=regrouped if launched.store_outlives else None,
        ),
    )
    return end(outcome.reason, outcome.message, step=outcome.step, log=log)


@click.command()
@CONFIG
@ASSIGNMENTS
@click.option("--log", type=click.Choice(["text", "json"]), default="text", help="What rank 0 prints.")
@click.option("--single-process", is_flag=True, help="Run unpartitioned in this process, for comparison.")
@click.option(
    "--ranks", type=click.IntRange(1), default=None, help="Start this many local ranks; not under torchrun."
)
@click.option(
    "--device",
    type=click.Choice([choice.value for choice in DeviceChoice]),
    default=DeviceChoice.AUTO.value,
    show_default=True,
    help="What ranks compute on; auto: GPUs where each rank of this machine has one, else the CPU.",
)
@click.option(
    "--channel", "channel_folder", type=click.Path(path_type=Path), default=None, help="Directory for plans."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write the actions of each rank in two steps here when the run ends, for chrome://tracing or "
    "Perfetto.",
)
@click.option(
    "--trace-step", type=click.IntRange(1), default=10, show_default=True, help="The first of them."
)
def run(config_path: Path, assignments: tuple[str, ...], ranks: int | None, **given: Any) -> None:
    """Train from a file: alone, with --ranks, or under torchrun."""
    options = _Options(**given)
    erase = erasure()
    form = "%(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"{erase}{form}")

    # Local ranks share it.
    unsaid = multiprocessing.get_context("fork").Lock()
    known: dict[str, Any] = {}

    def body(local_rank: int = 0, log: Path | None = None) -> int:
        if "RANK" in os.environ:
            for handler in logging.root.handlers:
                handler.setFormatter(logging.Formatter(f"{erase}[rank {os.environ['RANK']}] {form}"))
        try:
            if options.trace is not None and not options.trace.parent.is_dir():
                reason = f"no folder {options.trace.parent}. To fix: make it, or write elsewhere"
                raise ConfigurationError("--trace", reason)
            # One that starts again has what the others have.
            config = copy.deepcopy(known) or read_config(config_path, assignments)
            return _run(config, options, log)
        # SystemExit of a user's layer, too: a rank must not leave as if the job were done.
        except (Exception, SystemExit) as error:
            reason = reason_of(error)
            if reason in _SAID_ONCE and not unsaid.acquire(block=False):
                return _SAID_ONCE[reason]
            if reason is ExitReason.FAILED and not explains_itself(error):
                logger.exception("training failed")
            return end(reason, describe(error), log=log)

    if ranks is not None and ranks > 1 and not options.single_process and "RANK" not in os.environ:
        with contextlib.suppress(ConfigurationError):  # the ranks say what is wrong
            known.update(read_config(config_path, assignments))
        restarts = _restarts(known, follows_plans=options.channel_folder is not None)
        sys.exit(run_local_ranks(ranks, body, restarts=restarts))
    leave(body())
