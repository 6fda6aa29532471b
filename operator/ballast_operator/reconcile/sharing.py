"""Jobs on the GPU of a job, as a pass finds them."""

from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.kinds import Key, key_of_job
from ballast_operator.observation.observer import Observer
from ballast_operator.views.assignment import Assignment, AssignmentAction
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.sharing.sharer import Sharer, sharer_of


def on_the_same_gpu(
    observer: Observer, view: JobView, assignment: Assignment | None
) -> tuple[Sharer | None, Time | None]:
    """(who is on its GPU as well, or would be at its launch; when its last partner left a GPU)."""
    allocation = view.status.allocation
    if allocation is not None:
        node = allocation.nodes[0] if allocation.shared_gpu is not None and allocation.nodes else ""
    else:
        launches = assignment is not None and assignment.action is AssignmentAction.PLACE
        placement = assignment.placement if assignment is not None and assignment.may_share else None
        node = placement.nodes[0] if launches and placement is not None else ""
    if not node:
        return None, None
    partner = allocation.partner if allocation is not None else ""
    last = observer.status(key_of_job(partner)) if partner else None
    sharer = sharer_of(view.key, node, observer.gpu_holders.allocations_on([node]))
    return sharer, last.gpu_left_at if last is not None else None


def jobs_to_requeue(old: TrainingJobStatus, new: TrainingJobStatus) -> set[Key]:
    """Jobs that share, or have shared, the job's GPU, if it has come to the GPU or left it."""
    before, after = old.allocation, new.allocation
    if (before is None or before.shared_gpu is None) and (after is None or after.shared_gpu is None):
        return set()
    if (before is not None and before.pays) == (after is not None and after.pays):
        return set()
    held = (allocation.partner for allocation in (before, after) if allocation is not None)
    return {key_of_job(partner) for partner in held if partner}
