"""Rows of history: what jobs did, what decisions saw, and what jobs held, which :mod:`.twin` reads."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ballast_policies.scheduling.decision import SchedulingPolicy
from ballast_policies.scheduling.state import ClusterJob, ClusterState
from ballast_policies.simulator.replay import WITHIN, RecordedCluster, Replay

from ballast_operator.api.training_job_status import allocation_in
from ballast_operator.history.recent import seconds_of
from ballast_operator.kube.kinds import Object, key_of, spec_of

SEEN, COURSE, CLUSTER, TWIN = "seen", "course", "cluster", "twin"
"""Kinds of rows: a job as decisions saw it last, what it held from then on, the pools, a replay's result."""

SPEEDS_DIFFER = 0.005
"""Part by which a speed has to change for the job to be kept again."""

LONGEST = 2_000
"""Characters of a message that are kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job that is or was there. Times in epoch seconds; None: that has not happened, or was not seen.

    Attributes:
        message: of the condition behind its state: why it failed, or waits.
        restarts: by cause.
        goodput: the part of its GPUs' time that was productive; None: not known.
        pools: pool -> (GPU seconds, cost).
    """

    uid: str
    namespace: str
    name: str
    team: str
    created: float | None
    finished: float | None
    deleted: float | None
    updated: float
    state: str
    message: str
    launches: int
    restarts: dict[str, int]
    step: int
    total_steps: int
    gpu_seconds: float
    cost: float
    startup_cost: float
    lost_steps: int
    lost_cost: float
    goodput: float | None
    pools: dict[str, Any]

    @classmethod
    def of(cls, item: Object, at: float, *, deleted: bool) -> "JobRecord":
        """Record of the object as it was seen last."""
        status: Any = item.get("status") or {}
        created, finished = item["metadata"].get("creationTimestamp"), status.get("finishedAt")
        conditions = {each["type"]: each for each in status.get("conditions") or []}
        state = status.get("state") or "New"
        said = conditions.get(state) or conditions.get("Admitted") or {}
        pools = {
            entry["pool"]: (entry.get("gpuSeconds", 0.0), entry.get("cost", 0.0))
            for entry in status.get("poolCosts") or []
        }
        namespace, name = key_of(item)
        return cls(
            uid=item["metadata"]["uid"],
            namespace=namespace,
            name=name,
            team=spec_of(item).get("entity") or "",
            created=seconds_of(created, at) if created else None,
            finished=seconds_of(finished, at) if finished else None,
            deleted=at if deleted else None,
            updated=at,
            state=state,
            message=str(said.get("message", ""))[:LONGEST],
            launches=int(status.get("launches") or 0),
            restarts=dict(status.get("restarts") or {}),
            step=int((status.get("progress") or {}).get("step") or 0),
            total_steps=int(spec_of(item).get("totalSteps") or 0),
            gpu_seconds=sum(seconds for seconds, _ in pools.values()),
            cost=float(status.get("costSoFar") or 0.0),
            startup_cost=sum(entry.get("startupCost", 0.0) for entry in status.get("poolCosts") or []),
            lost_steps=int(status.get("lostSteps") or 0),
            lost_cost=float(status.get("lostCost") or 0.0),
            goodput=(status.get("gpuTime") or {}).get("goodput"),
            pools=pools,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A row: JSON, of the job ``uid`` or, empty, of the cluster."""

    what: str
    uid: str
    at: float
    content: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Statements of a job that decisions see as what is left of them.

    Attributes:
        live: it changes its size without a restart.
        deadline: epoch seconds; None: none.
        budget: for all of its steps; None: none.
    """

    uid: str
    live: bool = False
    deadline: float | None = None
    budget: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision.

    Attributes:
        at: epoch seconds.
        state: on which was decided.
        policy: by which.
        round_ends: when the round ends.
        jobs: by name.
    """

    at: float
    state: ClusterState
    policy: SchedulingPolicy
    round_ends: float | None
    jobs: Mapping[str, Stated]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """GPUs that a job held from ``at`` on, and its sums until then.

    Attributes:
        nodes: one for each GPU.
        apart: it is in several pools, or shares its GPU.
        trains: all its ranks train.
        joining: some of the nodes are of ranks that do not train yet.
    """

    at: float
    state: str
    pool: str = ""
    gpu_type: str = ""
    nodes: tuple[str, ...] = ()
    apart: bool = False
    trains: bool = False
    joining: bool = False
    launches: int = 0
    step: int = 0
    cost: float = 0.0

    @classmethod
    def of(cls, item: Object, at: float) -> "Held":
        """GPUs held by a TrainingJob as it is stored."""
        status: Any = item.get("status") or {}
        held = allocation_in(status)
        true = {each.get("type") for each in status.get("conditions") or [] if each.get("status") == "True"}
        return cls(
            at=at,
            state=str(status.get("state") or "New"),
            pool="" if held is None else held.pool,
            gpu_type="" if held is None else held.gpu_type,
            nodes=() if held is None else held.placement.nodes,
            apart=held is not None and (len(held.by_pool) > 1 or bool(held.partner)),
            trains=held is not None and "Running" in true and held.ending is None,
            joining=held is not None and bool(held.joining),
            launches=int(status.get("launches") or 0),
            step=int((status.get("progress") or {}).get("step") or 0),
            cost=float(status.get("costSoFar") or 0.0),
        )

    @property
    def what(self) -> tuple[object, ...]:
        """Equal while the job holds the same."""
        ended = self.state if self.state in ("Succeeded", "Failed", "Suspended") else ""
        return ended, self.pool, self.nodes, self.launches, self.trains, self.joining, self.apart


class Rows:
    """Makes rows of what has changed since the last ones; each method in one thread.

    A row for which there is no room, so that no further one is asked for, comes again with the next change.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, ...]] = {}
        self._seen: dict[str, tuple[ClusterJob, Stated, str]] = {}
        self._cluster: RecordedCluster | None = None

    def of_job(self, uid: str, item: Object, at: float, *, deleted: bool) -> Iterator[Kept]:
        """Record of what the job holds now, if that is new."""
        held = Held.of(item, at)
        if self._held.get(uid) != held.what:
            yield Kept(what=COURSE, uid=uid, at=at, content=_text(dataclasses.asdict(held)))
            self._held[uid] = held.what
        if deleted:
            self._held.pop(uid, None)

    def of_decision(self, decided: Decided) -> Iterator[Kept]:
        """The pools and the jobs that are new, or of which something recorded is."""
        state, there = decided.state, set[str]()
        for one in state.jobs:
            stated = decided.jobs.get(one.name)
            if stated is None:
                continue
            uid = stated.uid
            there.add(uid)
            before = self._seen.get(uid)
            if before is not None and before[1] == stated and _alike(before[0], one):
                continue
            text = _text(_as_seen(one, stated))
            if before is None or before[2] != text:
                yield Kept(what=SEEN, uid=uid, at=0.0, content=text)
            self._seen[uid] = one, stated, text
        for uid in self._seen.keys() - there:
            del self._seen[uid]
        cluster = RecordedCluster(
            at=decided.at,
            nodes=state.capacity.nodes,
            pools=state.capacity.pools,
            policy=decided.policy,
            spot=state.spot,
            round_ends=decided.round_ends,
        )
        if self._cluster is None or not _same(self._cluster, cluster):
            yield Kept(what=CLUSTER, uid="", at=decided.at, content=_text(dataclasses.asdict(cluster)))
            self._cluster = cluster


def _same(old: RecordedCluster, new: RecordedCluster) -> bool:
    if dataclasses.replace(old, at=0, round_ends=None) != dataclasses.replace(new, at=0, round_ends=None):
        return False
    if old.round_ends is None or new.round_ends is None:
        return old.round_ends == new.round_ends
    seconds = new.policy.round_seconds
    return abs((new.round_ends - old.round_ends + seconds / 2) % seconds - seconds / 2) < 0.5


def _alike(old: ClusterJob, new: ClusterJob) -> bool:
    """True if nothing recorded of a job has changed but speeds by digits: there are thousands."""
    if old is new:
        return True
    before, after = old.job, new.job
    if (before.gpus, before.weight, before.entity) != (after.gpus, after.weight, after.entity):
        return False
    if old.closed_pools != new.closed_pools or old.usd_per_step != new.usd_per_step:
        return False
    sizes, more = (None if one.elastic is None else one.elastic.speeds for one in (old, new))
    if (sizes is None) is not (more is None) or not _near(before.throughput, after.throughput):
        return False
    if sizes is None or more is None:
        return True
    return sizes.keys() == more.keys() and all(_near(rates, more[kind]) for kind, rates in sizes.items())


def _near(old: Mapping[Any, float], new: Mapping[Any, float]) -> bool:
    return old.keys() == new.keys() and all(
        abs(rate - new[name]) <= SPEEDS_DIFFER * rate for name, rate in old.items()
    )


def _as_seen(one: ClusterJob, stated: Stated) -> dict[str, Any]:
    """A job without what changes as it trains; speeds by four digits."""
    job, gang = one.job, one.elastic
    fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(ClusterJob)}
    fields["job"] = dataclasses.replace(
        job,
        throughput={name: _rounded(rate) for name, rate in job.throughput.items()},
        steps_remaining=None,
        elapsed=0.0,
        isolated_elapsed=0.0,
        deadline=None,
        budget=None,
    )
    if gang is not None:
        speeds = {
            name: {gpus: _rounded(rate) for gpus, rate in by_size.items()}
            for name, by_size in gang.speeds.items()
        }
        fields["elastic"] = dataclasses.replace(gang, speeds=speeds, may_shrink=True, may_grow=True)
    fields |= {"placement": None, "mixed": None, "spread": None, "running_since": 0.0, "beside_speed": 1.0}
    fields |= {"trains_from": 0.0, "launches": 0, "grows_from": None, "left_out": ""}
    return {
        "one": dataclasses.asdict(ClusterJob(**fields)),
        "live": stated.live,
        "deadline": stated.deadline,
        "budget": stated.budget,
        "several_pools": one.mixed is not None and not one.mixed.fits_one_pool,
    }


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, default=sorted, separators=(",", ":"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwinResult:
    """Error of a replay, as a row of the file.

    Attributes:
        since, until: of the recording, epoch seconds.
        jobs: that were compared.
        unfinished: of these, not done in the replay.
        left_out: jobs that could not be replayed.
        time_error, typical_time_error, cost_error, agrees: as :class:`Replay` has them.
        within: up to which error it agrees.
    """

    since: float
    until: float
    jobs: int
    unfinished: int = 0
    left_out: int = 0
    time_error: float | None = None
    typical_time_error: float | None = None
    cost_error: float | None = None
    agrees: bool | None = None
    within: float = WITHIN

    @classmethod
    def of(cls, found: Replay) -> "TwinResult":
        """Row of a replay."""
        return cls(
            since=found.since,
            until=found.until,
            jobs=len(found.jobs),
            unfinished=len(found.unfinished),
            left_out=len(found.left_out),
            time_error=found.time_error,
            typical_time_error=found.typical_time_error,
            cost_error=found.cost_error,
            agrees=found.agrees(),
        )

    def as_row(self) -> Kept:
        """The row."""
        return Kept(what=TWIN, uid="", at=self.until, content=_text(dataclasses.asdict(self)))

    @property
    def text(self) -> str:
        """A sentence with the errors."""
        hours = (self.until - self.since) / 3600
        if not self.jobs:
            return f"no job that can be replayed has ended within {hours:.3g} h"
        words = [f"of {self.jobs} jobs that ended within {hours:.3g} h"]
        if self.time_error is not None:
            words.append(
                f"the replay's completion times are off by {self.time_error:+.1%} in sum and "
                f"{self.typical_time_error or 0.0:.1%} a job"
            )
        if self.cost_error is not None:
            words.append(f"costs by {self.cost_error:+.1%}")
        if self.unfinished:
            words.append(f"{self.unfinished} do not end in it")
        if self.left_out:
            words.append(f"{self.left_out} more are left out")
        return f"{', '.join(words)}; it agrees within {self.within:.0%}"
