"""Of which launches this process has made what their pods need in order to report.

Service accounts, roles and bindings are not watched; after a takeover they are looked at once more.
"""

from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView


class Rights:
    """By job: the UID and the launch."""

    def __init__(self) -> None:
        self._made: dict[Key, tuple[str, int]] = {}

    def made(self, view: JobView) -> bool:
        """They are there for the launch of ``view``; says whether that is news."""
        self._made[view.key] = (view.uid, view.launch)
        return view.lacks_rights

    def lack(self, key: Key, uid: str, status: TrainingJobStatus) -> bool:
        """Whether the job has a launch whose pods may lack them."""
        return status.allocation is not None and self._made.get(key) != (uid, status.allocation.launch)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._made.pop(key, None)
