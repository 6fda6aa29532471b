"""Of which launches this process has made what their pods need in order to report.

Service accounts, roles and bindings are not watched; after a takeover they are looked at once more.
"""

from typing import Any

from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView


class Rights:
    """By job: the UID and the launch."""

    def __init__(self) -> None:
        self._made: dict[Key, tuple[str, int]] = {}
        self._accounts: dict[Key, tuple[str, int]] = {}

    def made(self, view: JobView) -> bool:
        """They are there for the launch of ``view``; says whether that is news."""
        self._made[view.key] = (view.uid, view.launch)
        return view.lacks_rights

    def account_made(self, view: JobView, launch: int) -> bool:
        """The service account is there for a launch that is being written; says whether that is news."""
        news = self._accounts.get(view.key) != (view.uid, launch)
        self._accounts[view.key] = (view.uid, launch)
        return news

    def lacking(self, key: Key, uid: str, status: TrainingJobStatus) -> dict[str, Any]:
        """Fields of the job's view: what the pods of its launch may lack; nothing where it has none."""
        if status.allocation is None or self._made.get(key) == (uid, status.allocation.launch):
            return {}
        account = self._accounts.get(key) == (uid, status.allocation.launch)
        return {"lacks_rights": True, "lacks_account": not account}

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._made.pop(key, None)
        self._accounts.pop(key, None)
