"""What a running gang may change now, and what a change costs; the pauses are decision 0131."""

import datetime
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT
from ballast_policies.rounds.memory import resize_cooldown_seconds
from ballast_policies.simulator.decisions import DEFAULT_PAUSE_SECONDS, DEFAULT_RESTART_SECONDS

from ballast_operator.api.conditions import JobCondition
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

STOP_SECONDS = 5.0
"""Part of that until its pods have saved and are gone."""


def may_grow_from(view: JobView) -> Time | None:
    """From when on the gang may take more GPUs; None: as it is now, never."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not may_change_size(view):
        return None
    if spec.plans:
        return allocation.since + datetime.timedelta(seconds=resize_cooldown_seconds(restart_seconds(view)))
    if not _same_recipe(view, spec):
        return None
    if allocation.resized_at is None:
        return allocation.since
    settling = resize_cooldown_seconds(change_pause(view), allocation.failed_growths)
    return allocation.resized_at + datetime.timedelta(seconds=settling)


def may_change_size(view: JobView) -> bool:
    """Whether the gang trains and can become smaller or larger now, where degrees are planned by a restart.

    A script cannot.
    """
    allocation = view.running_allocation
    if allocation is None or view.shrinking or allocation.joining or view.leaving:
        return False
    by_restart = view.spec is not None and view.spec.grow and bool(view.spec.plans)
    return view.acknowledged and (view.resizable or by_restart)


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """Whether new pods would train with the configuration that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return _recipe(launched) == _recipe(spec.config_fields)


def _recipe(config: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    return {**config, "pipeline": {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}}


def change_pause(view: JobView) -> float:
    """Seconds that training stands still when the gang changes its size: as last measured, else a second."""
    allocation = view.status.allocation
    if allocation is not None and allocation.resize_pause_ms is not None:
        return allocation.resize_pause_ms / 1000
    measured = [repack.pause_ms for repack in view.status.repacks if repack.pause_ms is not None]
    return measured[-1] / 1000 if measured else DEFAULT_PAUSE_SECONDS


def may_move(view: JobView) -> bool:
    """Whether the gang trains, and could save, stop and start in another pool: nothing else is under way."""
    allocation, spec = view.running_allocation, view.spec
    if allocation is None or spec is None or not view.acknowledged:
        return False
    return not (view.shrinking or allocation.joining or (spec.is_script and not view.has_spoken))


def restart_seconds(view: JobView) -> float:
    """Seconds from the gang's stop to its first step elsewhere, as long as its last start took."""
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if running is None or not running.is_true or allocation is None:
        return DEFAULT_RESTART_SECONDS
    started = (running.last_transition_time - allocation.since).total_seconds()
    return STOP_SECONDS + started if started > 0 else DEFAULT_RESTART_SECONDS
