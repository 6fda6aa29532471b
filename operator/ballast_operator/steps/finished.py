"""A job that has succeeded or failed for good: nothing runs, and it may have an expiry."""

from ballast_operator.steps.outcome import Action, DeleteJob, DeletePod, Outcome, Situation, seconds_since


def tidy(situation: Situation) -> Outcome:
    """Delete pods that should not be alive, and the job itself when its time is over."""
    view, ttl = situation.view, situation.spec.ttl_seconds
    actions: tuple[Action, ...] = tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving)
    if ttl is None or view.status.finished_at is None:
        return Outcome(status=view.status, actions=actions)
    left = ttl - seconds_since(situation, view.status.finished_at)
    if left <= 0:
        return Outcome(status=view.status, actions=(*actions, DeleteJob(view.uid)))
    return Outcome(status=view.status, actions=actions, again_seconds=left)
