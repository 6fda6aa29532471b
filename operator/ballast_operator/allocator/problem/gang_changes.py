"""Changes of a running gang's size and place: which it may make now, and what they cost (decision 0131)."""

import datetime
import math
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT
from ballast_policies.rounds.gangs import PAUSE_SECONDS, RESTART_SECONDS
from ballast_policies.rounds.memory import resize_cooldown_seconds

from ballast_operator.api.conditions import JobCondition
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

STOP_SECONDS = 5.0
"""Part of that until its pods have saved and are gone."""


def may_grow_from(view: JobView) -> Time | None:
    """Time from which the gang may take more GPUs; None: as it is now, never."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not may_change_size(view):
        return None
    began = allocation.since
    if spec.plans:
        began = began if live_sizes(view) else restarts_from(view, began)
    elif not _same_recipe(view, spec):
        return None
    if allocation.resized_at is None:
        return began
    settling = resize_cooldown_seconds(change_pause(view), allocation.failed_growths)
    return max(began, allocation.resized_at + datetime.timedelta(seconds=settling))


def restarts_from(view: JobView, since: Time) -> Time:
    """Time from which a gang of planned degrees, launched at ``since``, may take more GPUs by a restart."""
    return since + datetime.timedelta(seconds=resize_cooldown_seconds(restart_seconds(view)))


def live_sizes(view: JobView) -> tuple[int, ...]:
    """Sizes that a gang of planned degrees may have without a restart; of another: none."""
    launched = view.launched_spec
    if not view.live_plans or not view.resizable or launched is None or not _same_recipe(view, launched):
        return ()
    return tuple(view.live_plans)


def may_change_size(view: JobView) -> bool:
    """True if the gang trains and can change its size now, maybe by a restart; no script."""
    allocation = view.running_allocation
    if allocation is None or view.shrinking or allocation.joining or view.leaving:
        return False
    by_restart = view.spec is not None and view.spec.grow and bool(view.spec.plans)
    return view.acknowledged and (view.resizable or by_restart)


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """True if new pods would train with the configuration that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return _recipe(launched, spec) == _recipe(spec.config_fields, spec)


def _recipe(config: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    rest = {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}
    return {**config, "pipeline": rest} | ({"plan": None} if spec.asked.planner is not None else {})


def change_pause(view: JobView) -> float:
    """Seconds that training stands still when the gang changes its size: as last measured, else a second."""
    allocation = view.status.allocation
    if allocation is not None and allocation.resize_pause_ms is not None:
        return allocation.resize_pause_ms / 1000
    measured = [repack.pause_ms for repack in view.status.repacks if repack.pause_ms is not None]
    return measured[-1] / 1000 if measured else PAUSE_SECONDS


def may_move(view: JobView) -> bool:
    """True if the gang trains, and could save, stop and start in another pool: nothing else is under way."""
    allocation, spec = view.running_allocation, view.spec
    if allocation is None or spec is None or not view.acknowledged:
        return False
    return not (view.shrinking or allocation.joining or (spec.is_script and not view.has_spoken))


def restart_seconds(view: JobView) -> float:
    """Seconds from the gang's stop to its first step elsewhere, as long as its last start took."""
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if running is None or not running.is_true or allocation is None:
        return RESTART_SECONDS
    started = (running.last_transition_time - allocation.since).total_seconds()
    return STOP_SECONDS + started if started > 0 else RESTART_SECONDS


def trains_from(view: JobView, now: Time) -> float:
    """Epoch seconds when the ranks of the running gang had their plan; infinite: it starts.

    0: none runs, or it is not known, as a clock was set back since. A start ends, one way or the other, by
    the deadlines of its pods and of its plan's acknowledgement.
    """
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if allocation is None:
        return 0.0
    if running is None or not running.is_true:
        return math.inf
    return running.last_transition_time.timestamp() if running.last_transition_time <= now else 0.0


def most_gpus(view: JobView) -> int:
    """Most GPUs that the job wants: after its own repack at most its ranks, as its model stays smaller."""
    spec = view.spec
    assert spec is not None
    wanted = spec.largest_gang
    own = [repack for repack in view.status.repacks if not repack.asked]
    if own:
        kept = len(own[-1].survivors) if own[-1].gpus is None else own[-1].gpus
        # gpusPerPod may have been changed since.
        wanted = min(wanted, -(-kept // spec.gpus_per_pod) * spec.gpus_per_pod)
    return wanted
