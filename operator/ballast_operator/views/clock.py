"""Times as Kubernetes writes them."""

import datetime

Time = datetime.datetime
"""Always aware, UTC."""


def now() -> Time:
    """The present, in whole microseconds."""
    return datetime.datetime.now(datetime.UTC)


def parse(text: str) -> Time:
    """RFC 3339 -> time.

    Raises:
        ValueError: not a time.
    """
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(datetime.UTC)
    except OverflowError as error:
        raise ValueError(f"{text} is not between the years 1 and 9999 in UTC") from error


def parsed(text: object) -> Time | None:
    """A time; None where there is none that can be read."""
    try:
        return parse(text) if isinstance(text, str) and text else None
    except ValueError:
        return None


def show(time: Time) -> str:
    """Time -> RFC 3339 in whole seconds, as metav1.Time."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def show_micro(time: Time) -> str:
    """Time -> RFC 3339 with microseconds, as metav1.MicroTime."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
