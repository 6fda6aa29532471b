"""Logs of machines that were always asked for again: granted, running, not running, refused.

The format of the dissertation's own logs (training_on_a_dime): ``[UTC] Created instance ID with N GPU(s) of
type T in zone Z``, ``[UTC] Instance ID running in zone Z``, ``[UTC] Instance ID not running in zone Z``,
``[UTC] Instance ... creation failed``, ``[UTC] Successfully deleted instance ID``.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from ballast_policies.prices.offers import MOST_GPUS, PriceLogError, seconds_of

from ballast_lab.prices.availability import AvailabilityLog, Span
from ballast_lab.prices.offers import Pool

LONGEST_LINE = 1000
MOST_MACHINES = 10_000

_LINE = re.compile(r"\[(?P<time>[^\]]{1,40})\] (?P<event>.+)")
_CREATED = re.compile(
    r"Created instance (?P<id>\S+) with (?P<gpus>\d{1,4}) GPU\(s\) "
    r"of type (?P<type>\S+) in zone (?P<zone>\S+)"
)
_SEEN = re.compile(r"Instance (?P<id>\S+) (?P<state>running|not running) in zone (?P<zone>\S+)")
_IGNORED = re.compile(
    r"Instance (?:\S+|with \d+ GPU\(s\) of type \S+) creation failed|Successfully deleted instance \S+"
)
_AWS_ZONE = re.compile(r"[a-z]{2}(?:-[a-z]+){1,3}-\d(?:-[a-z]{3}-\d)?[a-z]")
_GCP_ZONE = re.compile(r"[a-z]+(?:-[a-z]+)+\d+-[a-z]")
GCP_PREFIX = "nvidia-tesla-"


@dataclasses.dataclass(slots=True)
class _Machine:
    pool: Pool
    granted: float
    seen: float


def cloud_of_zone(zone: str) -> str:
    """The cloud whose zones are named so; Azure's, which are regions, where it is neither of the others."""
    if _AWS_ZONE.fullmatch(zone):
        return "aws"
    return "gcp" if _GCP_ZONE.fullmatch(zone) else "azure"


def parse_availability(text: str, *, source: str) -> Mapping[Pool, AvailabilityLog]:
    """Availability of each pool's machines over time.

    A machine is lost in the middle of the time between the last look that found it running and the first
    that did not. Where several machines of a pool were watched, the pool is up while any of them runs.

    Raises:
        PriceLogError: a line is not of this format, times go backwards, or there is no line.
    """
    running: dict[str, _Machine] = {}
    spans: dict[Pool, list[Span]] = {}
    first = now = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        found = _LINE.fullmatch(line.strip()) if len(line) <= LONGEST_LINE else None
        if found is None:
            raise PriceLogError(f"{where}: {line[:80]!r} is not '[time] event'")
        moment = seconds_of(found["time"], where=where)
        if now is not None and moment < now:
            raise PriceLogError(
                f"{where}: {found['time']} is before the line above. To fix: sort the log by time"
            )
        now, first = moment, moment if first is None else first
        event = found["event"]
        if created := _CREATED.fullmatch(event):
            if len(running) >= MOST_MACHINES:
                raise PriceLogError(f"{where}: more than {MOST_MACHINES} machines at a time")
            pool = _pool(created, where)
            _lost(running, spans, created["id"], now)
            running[created["id"]] = _Machine(pool, now, now)
            spans.setdefault(pool, [])
        elif seen := _SEEN.fullmatch(event):
            if seen["state"] == "not running":
                _lost(running, spans, seen["id"], now)
            elif seen["id"] in running:
                running[seen["id"]].seen = now
        elif not _IGNORED.fullmatch(event):
            raise PriceLogError(f"{where}: {event[:80]!r} is no event of an availability log")
    if first is None or now is None:
        raise PriceLogError(f"{source}: there is no line")
    for machine in running.values():
        spans[machine.pool].append(Span(start=machine.granted, end=machine.seen, preempted=False))
    return {
        pool: AvailabilityLog(start=first, end=now, spans=any_running(lives)) for pool, lives in spans.items()
    }


def _pool(created: re.Match[str], where: str) -> Pool:
    gpus = int(created["gpus"])
    if not 1 <= gpus <= MOST_GPUS:
        raise PriceLogError(f"{where}: {gpus} GPUs is not from 1 to {MOST_GPUS}")
    return Pool(
        cloud=cloud_of_zone(created["zone"]),
        zone=created["zone"],
        gpu_type=created["type"].lower().removeprefix(GCP_PREFIX),
        gpus=gpus,
    )


def _lost(running: dict[str, _Machine], spans: dict[Pool, list[Span]], name: str, now: float) -> None:
    machine = running.pop(name, None)
    if machine is not None:
        end = (machine.seen + now) / 2
        spans[machine.pool].append(Span(start=machine.granted, end=end, preempted=True))


def any_running(lives: Iterable[Span]) -> tuple[Span, ...]:
    """Overlapping lives of several machines joined: the pool is up while one of them runs."""
    joined: list[Span] = []
    for life in sorted((life for life in lives if life.end > life.start), key=lambda life: life.start):
        if joined and life.start < joined[-1].end:
            last = joined[-1]
            later = life if life.end > last.end else last
            joined[-1] = Span(start=last.start, end=later.end, preempted=later.preempted)
        else:
            joined.append(life)
    return tuple(joined)
