"""Times as Kubernetes writes them, and the clock that all loops of an operator read."""

import dataclasses
import datetime
import email.utils
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

Time = datetime.datetime
"""Always aware, UTC."""

LEAST_STEP_SECONDS = 2.0
"""Difference of a wall clock from the time that passes below which it is followed at once."""

FOLLOWED_AFTER_SECONDS = 600.0
"""So long has a step of the wall clock to last before it counts."""

MOST_SKEW_SECONDS = 5.0
"""Most difference of two machines' clocks: Leases and notices are compared with minutes."""


def skew(asked: float, server: float, answered: float) -> float:
    """Seconds by which a clock is at least ahead of a server's; 0: they may agree.

    Args:
        asked: when the question went out, by the clock.
        server: when it was answered, by the server's, without fractions of a second.
        answered: when the answer came, by the clock.
    """
    return asked - server if asked > server else min(answered - server, 0.0)


class SteadyClock:
    """The API server's clock, of which a step counts only once it has lasted ``FOLLOWED_AFTER_SECONDS``.

    It is this machine's wall clock, put right by what answers say. Until a step counts time goes on as it
    passes, so that a clock that is set wrong and back bills and ends no job.
    ``passed``: seconds since any fixed moment, which no step of the ``wall`` clock changes. Threads may share
    it: what they hear and say at once differs by as much as they are apart.
    """

    def __init__(self, wall: Callable[[], Time], passed: Callable[[], float]) -> None:
        self._wall, self._passed = wall, passed
        self._ahead = datetime.timedelta()
        self._heard = False
        self._at = wall(), passed()
        self._step: tuple[float, float] | None = None
        self._said: dict[str, float] = {}

    def heard(self, date: str, asked: float) -> None:
        """The API server answered at ``date``, as HTTP has it; ``asked``: when, by the wall clock."""
        server = http_date(date)
        if server is None:
            return
        known = self._ahead.total_seconds()
        more = skew(asked - known, server.timestamp(), self._wall().timestamp() - known)
        if abs(more) > MOST_SKEW_SECONDS:
            self._ahead += datetime.timedelta(seconds=more)
            text = f"{known + more:+.0f} s from the API server's, which counts. To fix: synchronise it (NTP)"
            if abs(known + more) <= MOST_SKEW_SECONDS:
                text = "as the API server's again"
            self._warn(f"this machine's clock is {text}")
            if not self._heard:
                self._at = self._wall() - self._ahead, self._passed()
        self._heard = True

    def _warn(self, text: str) -> None:
        """Once in a while: API servers whose clocks differ may answer in turns."""
        now = self._passed()
        self._said = {said: at for said, at in self._said.items() if now - at < FOLLOWED_AFTER_SECONDS}
        if text not in self._said:
            self._said[text] = now
            logger.warning("%s", text)

    def __call__(self) -> Time:
        """The present."""
        wall, passed = self._wall() - self._ahead, self._passed()
        (at, since), step = self._at, self._step
        steady = at + datetime.timedelta(seconds=passed - since)
        ahead = (wall - steady).total_seconds()
        if abs(ahead) < LEAST_STEP_SECONDS:
            self._at, self._step = (wall, passed), None
            return wall
        if step is None or abs(ahead - step[0]) >= LEAST_STEP_SECONDS:
            self._step = ahead, passed
            still = f"this counts if it is still so in {FOLLOWED_AFTER_SECONDS:.0f} s"
            self._warn(f"the wall clock stepped by {ahead:+.0f} s; {still}")
        elif passed - step[1] >= FOLLOWED_AFTER_SECONDS:
            self._at, self._step = (wall, passed), None
            logger.warning("the operator's time steps by %+.0f s, to the wall clock", ahead)
            return wall
        return steady


def _passed() -> float:
    # Of a machine that sleeps, too, where the system tells it.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


_OF_THIS_PROCESS = SteadyClock(lambda: datetime.datetime.now(datetime.UTC), _passed)


heard = _OF_THIS_PROCESS.heard
"""Tells this process's clock when the API server has answered."""


def now() -> Time:
    """The present by this process's ``SteadyClock``, in whole microseconds."""
    return _OF_THIS_PROCESS()


def epoch() -> float:
    """The same in seconds since 1970."""
    return now().timestamp()


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """Both clocks of an operator: the present, and ``seconds`` that never go back."""

    now: Callable[[], Time] = now
    seconds: Callable[[], float] = time.monotonic


OPERATORS = Clock()
"""Clock of this process."""


def parse(text: str) -> Time:
    """RFC 3339 -> time. Raises ValueError: not a time."""
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


MOST_SECONDS = 2.0**37
"""Since 1970, in the year 6325: from a time near the last one that there is none could go on."""


def http_date(text: str) -> Time | None:
    """The time of a header ``Date``, in UTC where it names no zone; None: it says none that can be."""
    try:
        at = email.utils.parsedate_to_datetime(text)
        seconds = at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()
    except (ValueError, OverflowError):
        return None
    in_range = 0.0 <= seconds < MOST_SECONDS
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC) if in_range else None


def show(time: Time) -> str:
    """Time -> RFC 3339 in whole seconds, as metav1.Time."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def show_micro(time: Time) -> str:
    """Time -> RFC 3339 with microseconds, as metav1.MicroTime."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
