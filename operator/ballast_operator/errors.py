"""Errors of the operator, one tree.

``Conflict`` and ``NotFound`` are ordinary: a pass that meets them is requeued quietly, for the caches
were behind the world.
"""


class OperatorError(Exception):
    """Base of all errors of this package."""


class NotLeader(OperatorError):  # noqa: N818 - reads as a sentence where it is raised
    """This replica does not hold the leader's Lease (any more): it stops writing at once."""


class LeaseLapsed(NotLeader):
    """This replica's term is over, and no other one was seen to hold the Lease."""


class HistoryError(OperatorError):
    """History cannot be read or written: there is none, or its database is away, full, broken or another."""


class RowsRefused(HistoryError):  # noqa: N818
    """The database refuses what is in these rows, whenever they are written."""


class NotFound(OperatorError):  # noqa: N818
    """The object does not exist (HTTP 404)."""


class Conflict(OperatorError):  # noqa: N818
    """The object exists already, has another uid, or has changed since it was read (HTTP 409, 412)."""


class NameTaken(OperatorError):  # noqa: N818
    """An object that is not the job's has the name of one that the job needs: it is left alone."""


class Rejected(OperatorError):  # noqa: N818
    """The API server refused the request for its content or for missing rights (HTTP 4xx): no retry helps."""


class Forbidden(Rejected):
    """The operator's account lacks the right (HTTP 403 by RBAC): a person has to grant it."""

    @property
    def told(self) -> str:
        """The error for a user, with what to change."""
        return f"the operator lacks a right: {self}. To fix: grant it the rules of the chart's ClusterRole"


class NotAllowed(Rejected):
    """The cluster does not allow the object now: a quota, Pod Security, a webhook, a missing PriorityClass.

    The object itself may be right, and the same request may succeed later.
    """


OVER_QUOTA = "exceeded quota"
"""Words of the API server of an object for which a ResourceQuota has no room."""


NAMESPACE_ENDS = "because it is being terminated"
"""Words of the API server of an object in a namespace that is being deleted."""


class Expired(Rejected):
    """The requested version is too old (HTTP 410): it is listed anew. It happens in good order."""


class ActionRefused(Rejected):
    """The API server refused an action, and no launch of the job can or need end for it."""


class Unavailable(OperatorError):  # noqa: N818
    """The API server did not answer in time, throttled, or failed: a retry may help."""


class Fenced(Unavailable):
    """The leader's Lease was not renewed for too long: nothing may be written until it is."""


class Unreachable(Unavailable):
    """No answer came from the API server, or its connection was lost."""


class TooSlow(Unreachable):
    """The API server took longer than an answer may take: it is busy, or waits for an admission webhook."""


def for_good(error: BaseException) -> bool:
    """True if the API server refused the content itself, so that the same request never succeeds."""
    return isinstance(error, Rejected) and not isinstance(
        error, (Expired, Forbidden, NotAllowed, ActionRefused)
    )


class ServerInternalError(Unavailable):
    """The API server could not handle the request, which a retry may not help.

    Mostly an admission webhook is the cause that does not answer, or whose patch does not apply.
    """
