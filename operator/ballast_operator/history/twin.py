"""A recording of what history has, to be replayed."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.replay import RecordedCluster, RecordedJob, Recording

from ballast_operator.history.recording import CLUSTER, COURSE, SEEN, Held, JobRecord

if TYPE_CHECKING:
    from ballast_operator.history.store import History

SAME_SECONDS = 5.0
"""A job that was seen so soon after it was created arrived when it was seen: API times are whole seconds."""

MOST_JOBS = 20_000

MOST_OFF = 10.0
"""A job whose steps and speeds are further apart has speeds that nobody has measured, and keeps them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A job as decisions saw it last."""

    one: ClusterJob
    live: bool = False
    deadline: float | None = None
    budget: float | None = None
    several_pools: bool = False


def _read(kind: type[Any], text: str) -> Any:
    return decode_text(kind, text, unknown="ignore", spelling=str)


def read_recording(history: "History", since: float, until: float) -> Recording:
    """History from ``since``, or its own begin, to ``until``, epoch seconds.

    Raises:
        HistoryError: it cannot be read.
    """
    rows = {what: history.kept(what, until=until, since=since) for what in (SEEN, COURSE, CLUSTER)}
    seen = {row.uid: row.content for row in rows[SEEN]}
    courses: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows[COURSE]:
        courses[row.uid].append(row.content)
    clusters, left_out = _clusters([row.content for row in rows[CLUSTER]], since), dict[str, str]()
    since = max(since, clusters[0].at if clusters else since)
    jobs = []
    for record in history.jobs(within=(since, until), most=MOST_JOBS):
        name = f"{record.namespace}/{record.name}"
        try:
            course = [_read(Held, text) for text in courses.get(record.uid, ())]
            found = _job(record, course, seen.get(record.uid, ""), since, until)
        except (ContractError, ValueError, ArithmeticError) as error:
            found = f"what is kept of it cannot be read: {error!s:.200}"
        if isinstance(found, str):
            left_out[name] = found
        elif found is not None:
            jobs.append(found)
    jobs.sort(key=lambda job: job.arrival)
    uses: Counter[str] = Counter()
    for number, job in enumerate(jobs):
        uses[job.one.name] += 1
        if uses[job.one.name] > 1:  # a name that was used again
            again = dataclasses.replace(job.one.job, name=f"{job.one.name}#{uses[job.one.name]}")
            jobs[number] = dataclasses.replace(job, one=dataclasses.replace(job.one, job=again))
    return Recording(since=since, until=until, clusters=clusters, jobs=tuple(jobs), left_out=left_out)


def _clusters(texts: Sequence[str], since: float) -> tuple[RecordedCluster, ...]:
    found: list[RecordedCluster] = []
    for text in reversed(texts):
        try:
            found.append(_read(RecordedCluster, text))
        except ContractError:  # of another version, or edited
            continue
        if found[-1].at <= since:
            break
    return tuple(reversed(found))


def _ends(record: JobRecord) -> float:
    times = [at for at in (record.finished, record.deleted) if at is not None]
    return min(times, default=float("inf"))


def _job(
    record: JobRecord, course: Sequence[Held], seen: str, since: float, until: float
) -> RecordedJob | str | None:
    """The job from ``since`` on; why it cannot be played; None: nothing of it is in the time."""
    if any(held.apart for held in course):
        return "it was in several pools, or shared a GPU"
    if not seen or not course:
        return "no decision that is kept has seen it"
    # What another release says of a job that this one has no field for, its replay would lack.
    known = decode_text(_Seen, seen, spelling=str)
    if known.several_pools:
        return "only several pools hold it"
    first, last = course[0], course[-1]
    created = record.created if record.created is not None else first.at
    arrived = first.at if 0 <= first.at - created <= SAME_SECONDS else created
    start, gone = max(arrived, since), _ends(record)
    done = record.state == "Succeeded" and record.finished is not None
    if done and last.state == "Succeeded":
        gone = last.at
    if gone <= start:
        return None
    total, cost = record.total_steps, record.cost
    end = Held(at=min(gone, record.updated), state="", step=total if done else record.step, cost=cost)
    before = [held for held in course if held.at <= start]
    now = before[-1] if before and start > arrived else None
    step, paid = (0.0, 0.0) if now is None else _between(now, [*course, end], start)
    placement = None
    if now is not None and now.nodes:
        placement = Placement(gpu_type=now.gpu_type, pool=now.pool, nodes=now.nodes)
    one = dataclasses.replace(
        known.one,
        job=dataclasses.replace(
            known.one.job,
            steps_remaining=max(1.0, total - step),
            elapsed=start - arrived,
            deadline=None if known.deadline is None else known.deadline - start,
            budget=None if known.budget is None else max(0.0, known.budget - paid),
        ),
        placement=placement,
        running_since=now.at if now is not None and placement is not None else 0.0,
    )
    return RecordedJob(
        one=_at_seen_pace(one, [*course, end]),
        live=known.live,
        arrival=start,
        gone=gone if gone <= until else None,
        done=done and gone <= until,
        suspended=_suspended([*course, end], start),
        cost=cost - paid,
        start_seconds=_mean_seconds(
            course, lambda old, new: bool(old.nodes) and not old.trains and new.trains
        ),
        stop_seconds=_mean_seconds(
            course, lambda old, new: _leaves(old, new) and new.state not in ("Succeeded", "Failed")
        ),
        end_seconds=_mean_seconds(course, lambda old, new: _leaves(old, new) and new.state == "Succeeded")
        or 0.0,
        growth_seconds=_mean_seconds(course, lambda old, new: old.joining and not new.joining) or 0.0,
    )


def _suspended(course: Sequence[Held], start: float) -> tuple[tuple[float, float], ...]:
    """Times of the job's suspensions from ``start`` on; infinite: until the end of its course."""
    found: list[tuple[float, float]] = []
    for held, later in itertools.pairwise(course):
        if held.state != "Suspended" or later.at <= start:
            continue
        ends = later.at if later is not course[-1] else math.inf
        begins = found.pop()[0] if found and found[-1][1] == held.at else max(start, held.at)
        found.append((begins, ends))
    return tuple(found)


def _at_seen_pace(one: ClusterJob, course: Sequence[Held]) -> ClusterJob:
    """The job with all speeds by one factor, so that it would have done what it did in the time it trained.

    In it are saves, evaluations, and what a speed that was stated has promised.
    """
    alone, promised, gpus = dataclasses.replace(one, placement=None), 0.0, 0
    for held, later in itertools.pairwise(course):
        if held.trains and not (held.joining and gpus):
            gpus = len(held.nodes)
        if held.trains and held.nodes:
            nodes = held.nodes[:gpus]
            speed = alone.speed(Placement(gpu_type=held.gpu_type, pool=held.pool, nodes=nodes))
            promised += speed * max(0.0, later.at - held.at)
    did = course[-1].step - course[0].step
    if promised <= 0 or not 1 / MOST_OFF <= did / promised <= MOST_OFF:
        return one  # it has hardly trained
    factor, job, gang = did / promised, one.job, one.elastic
    if gang is not None:
        speeds = {kind: {n: factor * v for n, v in sizes.items()} for kind, sizes in gang.speeds.items()}
        gang = dataclasses.replace(gang, speeds=speeds)
    throughput = {kind: factor * rate for kind, rate in job.throughput.items()}
    return dataclasses.replace(one, job=dataclasses.replace(job, throughput=throughput), elastic=gang)


def _leaves(old: Held, new: Held) -> bool:
    return bool(old.nodes) and not old.trains and not new.nodes


def _mean_seconds(course: Sequence[Held], ends: Callable[[Held, Held], bool]) -> float | None:
    """Mean time from a change to the next one, where that ``ends`` it; None: there is none."""
    took = [new.at - old.at for old, new in itertools.pairwise(course) if ends(old, new)]
    return sum(took) / len(took) if took else None


def _between(held: Held, course: Sequence[Held], at: float) -> tuple[float, float]:
    """(step, cost) at a time after ``held``, on the line to the next change."""
    later = next((each for each in course if each.at > held.at), held)
    part = min(1.0, (at - held.at) / (later.at - held.at)) if later.at > held.at else 0.0
    return held.step + part * max(0, later.step - held.step), held.cost + part * max(
        0.0, later.cost - held.cost
    )
