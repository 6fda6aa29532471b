"""A job with a gang of four, as a step sees it, to start from."""

import dataclasses
import datetime
from typing import Any

from ballast_operator.api.job_allocation import Ending
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import ReconcileContext, StepResult, Surroundings
from ballast_operator.views.job import JobView
from ballast_operator.views.lease import LeaseView
from ballast_operator.views.pod import PodView
from ballast_policies.contract.messages import Ack, Proposal, Report, Stage
from ballast_policies.protocol.observed import Action, Cause
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.assignments import Assignment

from tests.operator.views.builders import NOW, a_plan, a_spec, a_view

PODS = ("job-1-0", "job-1-1", "job-1-2", "job-1-3")
PROPOSAL = Proposal(
    epoch=1,
    step=40,
    kept_pods=PODS[:2],
    released_pods=PODS[2:],
    stages=(Stage(rank=0, first_layer=0, end_layer=3), Stage(rank=1, first_layer=3, end_layer=8)),
    step_seconds_before=1.0,
    step_seconds_after=1.05,
)
FOUR_V100 = Placement(gpu_type="v100", pool="v100", nodes=("n",) * 4)


def after(seconds: float) -> datetime.datetime:
    """This long after the launch was decided and its plan written."""
    return NOW + datetime.timedelta(seconds=seconds)


def a_context(
    view: JobView | None = None, *, seconds: float = 1.0, spec: dict[str, Any] | None = None, **changes: Any
) -> ReconcileContext:
    """A gang of four with its plan, ``seconds`` after its launch."""
    if view is None:
        view = a_view(pods=PODS, plan=a_plan(PODS), spec=a_spec())
    if spec:
        view = dataclasses.replace(view, spec=a_spec(**spec))
    assert view.spec is not None
    fields = {field.name for field in dataclasses.fields(Surroundings)}
    around = Surroundings(**{name: changes.pop(name) for name in fields & changes.keys()})
    values = {"assignment": None, "settings": JobSettings(), **changes}
    return ReconcileContext(view=view, spec=view.spec, now=after(seconds), around=around, **values)


def a_running_view(*, epoch: int = 1, plan: Any = None, **changes: Any) -> JobView:
    """As above, after rank 0 has acknowledged ``epoch``."""
    lease = LeaseView(ack=Ack(epoch=epoch, step=0))
    plan = a_plan(PODS) if plan is None else plan
    return a_view(**{"pods": PODS, "plan": plan, "spec": a_spec(), "lease": lease, **changes})


def an_idle_view(**changes: Any) -> JobView:
    """A job that holds nothing and has never run."""
    return a_view(**{"pods": (), "plan": None, "spec": a_spec(), "status": TrainingJobStatus(), **changes})


def with_ending(view: JobView, cause: Cause, message: str = "why") -> JobView:
    """The view, its launch ending since NOW."""
    allocation = view.status.allocation
    assert allocation is not None
    ending = Ending(cause=cause, message=message, since=NOW)
    status = view.status.replace(allocation=allocation.replace(ending=ending))
    return dataclasses.replace(view, status=status)


def with_pod(view: JobView, rank: int, **changes: Any) -> JobView:
    """The view with another state of one pod."""
    pods = tuple(dataclasses.replace(pod, **changes) if pod.rank == rank else pod for pod in view.pods)
    return dataclasses.replace(view, pods=pods)


def without_pods(view: JobView) -> JobView:
    return dataclasses.replace(view, pods=())


def a_pod(name: str, rank: int, **changes: Any) -> PodView:
    return PodView(name=name, uid=f"uid-{name}", launch=1, rank=rank, **changes)


def a_report(**changes: Any) -> Report:
    return Report(**{"epoch": 1, "step": 50, "loss": 2.0, "steps_per_second": 5.0, **changes})


def place(placement: Placement = FOUR_V100, **changes: Any) -> Assignment:
    values = {"launches": 0, "chosen": "4 x v100 of pool v100", "why": "because", **changes}
    return Assignment(action=Action.PLACE, placement=placement, **values)


def keep(**changes: Any) -> Assignment:
    return Assignment(action=Action.KEEP, **{"launches": 1, "placement": FOUR_V100, **changes})


def release(**changes: Any) -> Assignment:
    return Assignment(action=Action.RELEASE, **{"launches": 1, **changes})


def conditions(result: StepResult) -> dict[str, tuple[bool, str]]:
    """Condition type -> (value, reason) of the status that a step returns."""
    return {condition.type: (condition.is_true, condition.reason) for condition in result.status.conditions}
