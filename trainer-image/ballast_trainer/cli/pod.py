"""``ballast-train pod``: the ranks of a TrainingJob in one pod, driven by its plan."""

import faulthandler
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from ballast_client.api_server import ApiServer, ChannelError, NotInPodError
from ballast_policies.contract.limits import MOST_RANKS
from ballast_policies.contract.messages import (
    POD_IP_ENV,
    POD_RANKS_ENV,
    RANK_RESTARTS_ENV,
    RENDEZVOUS_PORT,
    ExitReason,
    process_name,
)
from ballast_policies.contract.plan import Directive, Plan

from ballast_trainer.causes import describe, explains_itself
from ballast_trainer.channel.base import Channel, DirectoryChannel, OperatorChannel
from ballast_trainer.channel.kubernetes import WatchingKubernetes
from ballast_trainer.cli.local_ranks import run_pod_ranks
from ballast_trainer.distributed.stopping import StopSignal, handover_seconds, stop_seconds
from ballast_trainer.environment import MOST_PORT, RESTARTS_ENV
from ballast_trainer.errors import ConfigurationError, PeerLost, Stopped
from ballast_trainer.process_exit import end, end_on_lost_peer, leave, reason_of
from ballast_trainer.warm_start import start_warm

logger = logging.getLogger("ballast_trainer.pod")

PLAN_POLL_SECONDS = 0.2
TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_LOG_ENV = "BALLAST_TERMINATION_LOG"
METRICS_PORT_ENV = "BALLAST_METRICS_PORT"
"""Variable of a pod template's container: rank 0 serves Prometheus metrics on this port."""


def _required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(name, "not set. To fix: the operator sets it; outside of a pod use `run`")
    return value


def _open_channel(job: str, pod: str) -> Channel:
    folder = os.environ.get("BALLAST_CHANNEL")
    if folder:
        return DirectoryChannel(Path(folder))
    try:
        api = ApiServer.from_environment(os.environ)
    except NotInPodError as error:
        raise ConfigurationError(error.variable, error.reason) from error
    return OperatorChannel(
        WatchingKubernetes(api, namespace=_required("BALLAST_NAMESPACE"), job=job, pod=pod)
    )


def wait_for_plan(
    channel: Channel, process: str, stop: StopSignal, *, again: bool = False
) -> tuple[Plan, Mapping[str, Any]]:
    """The first plan that names this process and lets it train, and the job's configuration.

    ``again``: the others may have begun, and be told to stop.

    Raises:
        PeerLost: the plan was written for an earlier pod of this name.
        Stopped: SIGTERM, or a plan with the directive to stop.
    """
    complaint = ""
    logger.info("waiting for a plan that names %s", process)
    while True:
        if stop.received:
            raise Stopped("told to stop before the first step; nothing to save")
        try:
            plan = channel.read_plan()
            if plan is not None and (rank := plan.rank_of(process)) is not None:
                _check_address(plan, rank)
                if plan.directive is Directive.CHECKPOINT_AND_STOP and not again:
                    raise Stopped(f"plan {plan.epoch} stops the job before the first step; nothing to save")
                config = channel.read_config()
                if config is not None:
                    return plan, config
        except ChannelError as error:
            if str(error) != complaint:
                complaint = str(error)
                logger.warning("channel: %s; trying again", complaint)
        time.sleep(PLAN_POLL_SECONDS)


def _check_address(plan: Plan, rank: int) -> None:
    """Raise where the plan's rank is another pod: a leader that died may have had a create under way.

    It would train alone what is launched again, or take the part of a rank of a gang that it has never met.
    """
    named, own = plan.ranks[rank].address, os.environ.get(POD_IP_ENV)
    if own and own != named:
        raise PeerLost(
            f"plan {plan.epoch} names {plan.ranks[rank].pod} at {named}, but this pod is at {own}: the plan "
            "was written for an earlier pod of this name, which is gone"
        )


def _count(name: str, most: int = MOST_RANKS) -> int:
    text = os.environ.get(name) or "1"
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigurationError(name, f"{text!r} is not a number from 1 to {most}. To fix: one of these")
    return int(text)


def _run_rank(local_rank: int, log: Path | None) -> int:
    """Train as one rank of the pod; returns its exit code."""
    faulthandler.enable(2)
    stop = StopSignal()
    try:
        stop = StopSignal(handover_seconds=handover_seconds())
        stop.install(seconds=stop_seconds(), overdue=end_on_lost_peer(log))
        return _train(_required("BALLAST_JOB"), _required("BALLAST_POD_NAME"), local_rank, stop, log)
    # SystemExit of a user's layer, too: a rank must not leave as if the job were done.
    except (Exception, SystemExit) as error:
        reason = reason_of(error)
        if stop.received and reason is not ExitReason.STOPPED:
            reason = ExitReason.STOPPED_UNSAVED
        if reason is ExitReason.FAILED and not explains_itself(error):
            logger.exception("training failed")
        return end(reason, describe(error), log=log)


def _train(job_name: str, pod: str, local_rank: int, stop: StopSignal, log: Path | None) -> int:
    process = process_name(pod, local_rank)
    channel = _open_channel(job_name, pod)
    restarts = int(os.environ.get(RESTARTS_ENV, "0"))
    # Torch takes seconds to import: import it while waiting for the plan.
    preload = threading.Thread(target=importlib.import_module, args=("ballast_trainer.preload",), daemon=True)
    preload.start()
    plan, value = wait_for_plan(channel, process, stop, again=restarts > 0)
    preload.join()
    from ballast_trainer.distributed.process_group import reach_store, serve_store, told_once
    from ballast_trainer.distributed.survivors import Fate
    from ballast_trainer.launch import ValidatedJob, train
    from ballast_trainer.loop.rank_launch import RankLaunch
    from ballast_trainer.reporting.console import JsonReporter

    value = {**value, **{name: {**(value.get(name) or {})} for name in ("checkpoint", "metrics")}}
    if path := os.environ.get("BALLAST_CHECKPOINT_PATH"):
        value["checkpoint"]["path"] = path
    if os.environ.get(METRICS_PORT_ENV):
        value["metrics"]["port"] = _count(METRICS_PORT_ENV, MOST_PORT)
    outlives = bool(os.environ.get(RANK_RESTARTS_ENV))
    if value["checkpoint"].get("inMemoryEverySteps") and not outlives:
        logger.warning(
            "checkpoint.inMemoryEverySteps has no effect before the next launch: this pod was made without it"
        )
        value["checkpoint"]["inMemoryEverySteps"] = 0
    job = ValidatedJob.from_mapping(value, unknown="ignore")
    rank = plan.rank_of(process)
    host = plan.ranks[0].address
    job.check_ranks(len(plan.ranks), cut=bool(plan.stages))
    # Pods of a gang need not start together.
    seconds = job.config.training.comm_timeout_seconds
    if rank == 0 and not restarts:
        job = job.with_ties()
    if rank == 0 and not outlives:
        store = serve_store(host, RENDEZVOUS_PORT, seconds)
    else:
        store = reach_store(host, RENDEZVOUS_PORT, seconds, stop)
    key = f"config/launch-{plan.launch}"
    shared = told_once(store, key, value, tells=rank == 0)
    if shared != value:
        logger.info("the configuration has changed since rank 0 started: it trains with rank 0's")
        job = ValidatedJob.from_mapping(shared, unknown="ignore")

    def store_of(plan: Plan) -> Any:
        store = reach_store(plan.ranks[0].address, RENDEZVOUS_PORT, seconds, stop)
        told_once(store, key, shared, tells=True)
        return store

    # One that was killed before it met the others begins as it would have.
    again = restarts > 0 and Fate.ENTERED.is_of(store, process)
    if rank == 0 and restarts and not again:
        job = job.with_ties()
    outcome = train(
        job,
        RankLaunch(
            plan=plan,
            process=process,
            channel=channel,
            reporter=JsonReporter(),
            stop=stop,
            lost=end_on_lost_peer(log),
            store=store,
            local_rank=local_rank,
            local_ranks=_count(POD_RANKS_ENV),
            joining=plan.directive is Directive.GROW and not again,
            restarts=restarts if again else 0,
            store_of=store_of,
        ),
    )
    return end(outcome.reason, outcome.message, step=outcome.step, log=log)


def _termination_log() -> Path | None:
    """Path of the termination message for the operator or the kubelet; None outside of pods."""
    named = os.environ.get(TERMINATION_LOG_ENV)
    if named:
        return Path(named)
    return TERMINATION_LOG if TERMINATION_LOG.exists() else None


@click.command()
def pod() -> None:
    """Run this pod's ranks of a TrainingJob, a process for each GPU.

    The operator sets BALLAST_JOB, BALLAST_JOB_UID, BALLAST_NAMESPACE, BALLAST_POD_NAME, BALLAST_POD_IP,
    BALLAST_POD_RANKS and BALLAST_CHECKPOINT_PATH. With BALLAST_CHANNEL the plan is read from files in that
    directory in place of the Kubernetes API.
    """
    warm = start_warm(os.environ)
    if warm is not None:
        os._exit(warm)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    log = _termination_log()
    try:
        ranks = _count(POD_RANKS_ENV)
        restarts = _count(RANK_RESTARTS_ENV) if os.environ.get(RANK_RESTARTS_ENV) else 0
        # Ranks meet at the store of their plan's first pod, which another one becomes where it is lost.
        store = (_required(POD_IP_ENV), RENDEZVOUS_PORT) if restarts else None
    except ConfigurationError as error:
        os._exit(end(reason_of(error), describe(error), log=log))
    if ranks == 1 and not restarts:
        leave(_run_rank(0, log))
    leave(run_pod_ranks(ranks, _run_rank, log, restarts=restarts, store=store))
