"""Errors of the client, one tree."""


class BallastError(Exception):
    """Base of all errors of this package; its text says what to change."""


class NotConnected(BallastError):  # noqa: N818 - reads as a sentence where it is raised
    """No kubeconfig can be used, or the API server does not answer."""


class LoggedOut(NotConnected):
    """The API server does not know the credentials, or they have expired."""


class NotFound(BallastError):  # noqa: N818
    """There is no such object."""


class AlreadyExists(BallastError):  # noqa: N818
    """An object has the name already."""


class Refused(BallastError):  # noqa: N818
    """The API server refused the content, or the cluster does not allow it."""


class Forbidden(Refused):
    """The account lacks the right."""


class JobFailed(BallastError):  # noqa: N818
    """A job that was waited for ended in another way."""


class WaitedTooLong(BallastError, TimeoutError):  # noqa: N818
    """The awaited event has not happened in time."""
