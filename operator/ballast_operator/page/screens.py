"""The five screens as values: what a template shows, from what the caches hold and who may see it."""

import dataclasses
import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import yaml
from ballast_policies.rounds.values import dedupe_shared_gpus

from ballast_operator.api.conditions import NO_POLICY, STATES, JobState
from ballast_operator.api.training_job_status import allocation_in
from ballast_operator.history.recent import DecisionLine, Recent, RoundLine, partition_now
from ballast_operator.kube.kinds import JOB, POD, POLICY, Key, Object, key_of, spec_of
from ballast_operator.page import pictures
from ballast_operator.report.costs import costs
from ballast_operator.report.explanation import Explanation, explanation
from ballast_operator.report.overview import JobLine, Overview, overview

PAGE_ROWS, MOST_OPTIONS, MOST_CHANGES = 100, 500, 200
WINDOWS = {"1h": 3600.0, "6h": 6 * 3600.0, "all": float("inf")}
"""Spans of time by name; all: what is remembered."""

LONGEST_YAML = 200_000
NAMES = {
    "startup": "start-up",
    "lostSteps": "lost steps",
    "moves": "moves",
    "checkpoint": "checkpoints",
    "straggling": "straggling",
    "idle": "idle in the pipeline",
}
"""Names of parts of GPU time that are not productive."""

TRAINS = frozenset({JobState.RUNNING, JobState.REPACKING})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Content of the caches at ``at`` (epoch seconds); ``namespaces``: with jobs now or lately."""

    at: float
    jobs: Mapping[Key, Object]
    policies: tuple[Object, ...]
    overview: Overview
    namespaces: frozenset[str]

    @classmethod
    def of(cls, recent: Recent, at: float) -> "Seen":
        """Look once. A list of a store's values is made in one go, whatever thread changes the store."""
        jobs, policies = list(recent.caches[JOB]), list(recent.caches[POLICY])
        return cls(
            at=at,
            jobs={key_of(job): job for job in jobs},
            policies=tuple(sorted(policies, key=lambda item: item["metadata"]["name"])),
            overview=overview(jobs, policies),
            namespaces=frozenset(key_of(job)[0] for job in jobs) | recent.namespaces(),
        )

    @property
    def now(self) -> datetime.datetime:
        """The same moment, as a time."""
        return datetime.datetime.fromtimestamp(self.at, datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Part of it that one person may see.

    Attributes:
        namespaces: whose jobs.
        policies: whether the person may see ClusterPolicies: pools, teams, rounds.
    """

    seen: Seen
    recent: Recent
    namespaces: frozenset[str]
    policies: bool

    def lines(self) -> list[JobLine]:
        """Lines of the jobs that may be seen."""
        return [line for line in self.seen.overview.jobs if line.namespace in self.namespaces]

    def job(self, key: Key) -> Object | None:
        """The job, where there is one that may be seen."""
        return self.seen.jobs.get(key) if key[0] in self.namespaces else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """A pool, or all pools of a type: its GPUs are those of jobs that train, held ones, and free ones."""

    name: str
    gpu_type: str
    capacity_type: str = ""
    region: str = ""
    nodes: int = 0
    gpus: int = 0
    trains: int = 0
    held: int = 0
    free: int = 0
    price: float | None = None
    hazard: tuple[float, float, float] | None = None
    shadow_price: float | None = None

    @property
    def use(self) -> pictures.Picture:
        """The three parts."""
        return pictures.parts(
            [("training", self.trains), ("held, not training", self.held), ("free", self.free)]
        )


def job_link(key: Key) -> str:
    """Address of the job's screen."""
    return f"/jobs/{quote(key[0], safe='')}/{quote(key[1], safe='')}"


def cluster(view: View, window: str) -> dict[str, Any]:
    """Pools and who runs in them, now and in the last hours."""
    lines, seen = view.lines(), view.seen
    pools = _pools(view) if view.policies else []
    oldest = min((span.start for span in view.recent.spans), default=seen.at)
    start = oldest if window == "all" else seen.at - WINDOWS[window]
    spans = defaultdict(list)
    for span in view.recent.spans:
        if span.key[0] in view.namespaces and (span.end is None or span.end >= start):
            link = job_link(span.key) if span.key in seen.jobs else ""
            spans[span.pool].append((span, f"{span.key[0]}/{span.key[1]}", link))
    names = [pool.name for pool in pools] or sorted(spans)
    states = Counter(line.state for line in lines)
    return {
        "pools": pools,
        "types": _types(pools),
        "timelines": [
            (name, pictures.timeline(spans.get(name, ()), start=start, end=seen.at)) for name in names[:32]
        ],
        "more_pools": max(0, len(names) - 32),
        "states": [(state, states[state]) for state in STATES if states[state]],
        "reasons": Counter(line.reason for line in lines if line.state == JobState.WAITING).most_common(8),
        "jobs": len(lines),
        "window": window,
        "windows": tuple(WINDOWS),
        "policy_lines": seen.overview.policies if view.policies else (),
        "no_policy": NO_POLICY if view.policies and not seen.policies else "",
        "hidden_policies": not view.policies,
    }


def _pools(view: View) -> list[PoolRow]:
    trains, held = Counter[str](), Counter[str]()
    # Of all namespaces: numbers without names. Of two jobs on one GPU, one that trains counts.
    statuses: list[Any] = [job.get("status") or {} for job in view.seen.jobs.values()]
    statuses.sort(key=lambda status: status.get("state") not in TRAINS)
    allocations = ((status, found) for status in statuses if (found := allocation_in(status)) is not None)
    for status, allocation in dedupe_shared_gpus(allocations, lambda each: each[1].shared_node):
        for part in allocation.on_nodes_by_pool:
            held[part.pool] += part.gpus
            trains[part.pool] += part.gpus if status.get("state") in TRAINS else 0
    rows = []
    for policy in view.seen.policies:
        status = policy.get("status") or {}
        bill = {entry["pool"]: entry for entry in status.get("bill") or []}
        hazard = {entry["pool"]: entry for entry in status.get("hazard") or []}
        shadow = status.get("shadowPrices") or {}
        stated = {pool["name"]: pool for pool in spec_of(policy).get("nodePools") or []}
        for entry in status.get("capacity") or []:
            name, risk = entry["pool"], hazard.get(entry["pool"])
            gpus, taken = entry.get("gpus", 0), max(held[name], entry.get("gpusHeld", 0))
            rows.append(
                PoolRow(
                    name=name,
                    gpu_type=entry["gpuType"],
                    capacity_type=entry.get("capacityType", ""),
                    region=entry.get("region", ""),
                    nodes=entry.get("nodes", 0),
                    gpus=gpus,
                    trains=trains[name],
                    held=taken - trains[name],
                    free=max(0, gpus - taken),
                    price=(bill.get(name) or stated.get(name) or {}).get("pricePerGpuHour"),
                    hazard=None
                    if risk is None
                    else tuple(risk.get(part, 0.0) for part in ("perHour", "perHourLow", "perHourHigh")),
                    shadow_price=shadow.get(entry["gpuType"]),
                )
            )
    return rows


def _types(pools: Sequence[PoolRow]) -> list[PoolRow]:
    found = []
    for kind in dict.fromkeys(pool.gpu_type for pool in pools):
        of_kind = [pool for pool in pools if pool.gpu_type == kind]
        sums = {
            name: sum(getattr(pool, name) for pool in of_kind)
            for name in ("nodes", "gpus", "trains", "held", "free")
        }
        prices = [pool.price for pool in of_kind if pool.price is not None]
        least, shadow = min(prices, default=None), of_kind[0].shadow_price
        found.append(PoolRow(name=kind, gpu_type=kind, price=least, shadow_price=shadow, **sums))
    return found


def cluster_curves(view: View) -> dict[str, Any]:
    """GPUs that jobs hold, by pool: for uPlot, times first."""
    samples = list(view.recent.samples) if view.policies else []
    names = sorted({name for _, pools in samples for name in pools})[:16]
    rows = [[pools.get(name) for _, pools in samples] for name in names]
    return {"series": [f"{name} (GPUs held)" for name in names], "data": [[at for at, _ in samples], *rows]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selection of the jobs to list; empty: all."""

    namespace: str = ""
    state: str = ""
    reason: str = ""
    pool: str = ""
    text: str = ""
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Filter":
        """Filter of an address."""
        page = query.get("page", "1")
        number = int(page) if page.isascii() and page.isdecimal() and len(page) < 7 else 1
        names = {name: query.get(name, "")[:253] for name in ("namespace", "state", "reason", "pool", "text")}
        return cls(page=max(1, number), **names)

    def holds(self, line: JobLine, pools: Sequence[str]) -> bool:
        """True if the job is one of them."""
        return (
            self.namespace in ("", line.namespace)
            and self.state in ("", line.state)
            and self.reason in ("", line.reason)
            and (not self.pool or self.pool in pools)
            and self.text.casefold() in f"{line.namespace}/{line.job}".casefold()
        )

    def address(self, **changes: Any) -> str:
        """Address of the list with these changes, without what is empty."""
        values = {**dataclasses.asdict(self), **changes}
        return "/jobs?" + urlencode(
            {name: value for name, value in values.items() if value and (name, value) != ("page", 1)}
        )


def jobs(view: View, chosen: Filter) -> dict[str, Any]:
    """The jobs that are listed, a page of them."""
    lines = view.lines()
    found = [line for line in lines if chosen.holds(line, _pools_of(view, line) if chosen.pool else ())]
    pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(chosen.page, pages)
    shown = found[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    return {
        "lines": [(line, job_link((line.namespace, line.job)), line.parts or _held(line)) for line in shown],
        "total": len(found),
        "first": (page - 1) * PAGE_ROWS + 1 if shown else 0,
        "page": page,
        "pages": pages,
        "chosen": chosen,
        "namespaces": _options(chosen.namespace, sorted({line.namespace for line in lines})),
        "states": _options(chosen.state, [*STATES]),
        "reasons": _options(chosen.reason, sorted({line.reason for line in lines if line.reason})),
    }


def _options(chosen: str, values: list[str]) -> list[str]:
    """The values to choose from, with the one that is chosen, which no job may have."""
    return [*([chosen] if chosen and chosen not in values else ()), *values][:MOST_OPTIONS]


def _held(line: JobLine) -> tuple[str, ...]:
    return (f"{line.gpus} x {line.gpu_type}",) if line.gpus else ()


def _pools_of(view: View, line: JobLine) -> tuple[str, ...]:
    allocation = allocation_in(view.seen.jobs[line.namespace, line.job].get("status"))
    return () if allocation is None else tuple(part.pool for part in allocation.by_pool)


def job(view: View, item: Object) -> dict[str, Any]:
    """A job: what has happened, where its layers are, what it costs and why it is where it is."""
    key, uid = key_of(item), item["metadata"].get("uid", "")
    seen, recent, caches = view.seen, view.recent, view.recent.caches
    found: Explanation = explanation(
        item, caches[POD].of_job(key), seen.policies if view.policies else (), []
    )
    (cost,) = costs([item], seen.policies, now=seen.now, all_jobs=False).jobs
    spans = [span for span in recent.spans if span.uid == uid]
    # What a move of layers has brought is known, and told, later than what came after it.
    events = sorted((event for event in recent.events if event.uid == uid), key=lambda event: event.at)
    start = min([span.start for span in spans] + [event.at for event in events], default=seen.at)
    partitions = list(recent.partitions(uid))
    now = partition_now(caches, key, seen.at)
    if now is not None and (not partitions or partitions[-1].stages != now.stages):
        partitions.append(now)
    shown = [(span, f"launch {span.launch}", "") for span in spans]
    return {
        "key": key,
        "link": job_link(key),
        "found": found,
        "line": overview([item], ()).jobs[0],
        "spec": spec_of(item),
        "created": item["metadata"].get("creationTimestamp", ""),
        "cost": cost,
        "names": NAMES,
        "time_parts": pictures.parts(
            [
                ("productive", cost.goodput or 0.0),
                *((NAMES[name], part) for name, part in cost.badput.items()),
            ]
        ),
        "cost_parts": pictures.parts(cost.parts),
        "timeline": pictures.timeline(shown, start=start, end=max(seen.at, start + 1)),
        "start": start,
        "events": events[::-1][:MOST_CHANGES],
        "partitions": [(each, pictures.stages(each)) for each in partitions],
        "policy_lines": found.policy if view.policies else (),
    }


def job_curves(view: View, item: Object) -> dict[str, Any]:
    """Loss and speed of a job: for uPlot, times first; what is no number is left out."""
    points = list(view.recent.curve(item["metadata"].get("uid", "")))
    loss, speed = (
        [point[number] if abs(point[number]) < 1e30 else None for point in points] for number in (1, 2)
    )
    return {"series": ["loss", "steps/s"], "data": [[at for at, *_ in points], loss, speed]}


def job_yaml(item: Object) -> str:
    """The job as it is stored; of a very long one the beginning, as JSON."""
    text = json.dumps(item, ensure_ascii=False)
    if len(text) > LONGEST_YAML:
        return f"{text[:LONGEST_YAML]}\n# ... cut after {LONGEST_YAML} of {len(text)} characters"
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(json.loads(text), Dumper=dumper, sort_keys=False, allow_unicode=True))


def teams(view: View) -> dict[str, Any]:
    """GPUs each team is owed (its part by weight; None: not read) and has, and what it may spend."""
    seen, had, waiting, active, shown = view.seen, Counter[str](), Counter[str](), set[str](), []
    for key, item in seen.jobs.items():
        status: Any = item.get("status") or {}
        team = spec_of(item).get("entity") or ""
        if status.get("state") not in (JobState.SUCCEEDED, JobState.FAILED):
            active.add(team)  # of all namespaces: they have their part, too
        if key[0] in view.namespaces:
            shown.append(item)
            had[team] += (status.get("allocation") or {}).get("gpus", 0)
            waiting[team] += status.get("state") in (None, JobState.WAITING)
    everything = view.policies and seen.namespaces <= view.namespaces
    found = costs(shown, seen.policies, now=seen.now, all_jobs=everything)
    policy = seen.policies[0] if view.policies and seen.policies else None
    objective = spec_of(policy).get("objective") or {} if policy is not None else {}
    total = ((policy or {}).get("status") or {}).get("gpus") or 0
    shares = owed_shares(objective.get("entities") or {}, active)
    reads = objective.get("policy") == "hierarchical"
    lines = found.teams
    if not view.policies:
        lines = tuple(dataclasses.replace(line, spent=None, budget=None) for line in lines)
    return {
        "rows": [
            (line, waiting[line.team], had[line.team], shares.get(line.team, 0.0) * total if reads else None)
            for line in lines
        ],
        "policy": objective.get("policy", ""),
        "reads": reads,
        "total": total,
        "hidden_policies": not view.policies,
    }


def owed_shares(entities: Mapping[str, Any], active: set[str]) -> dict[str, float]:
    """Part of the cluster of each team with jobs, by weight, level by level; teams that are not named: 1."""
    parent = {name: entry.get("parent") or "" for name, entry in entities.items()}
    weight = {name: float(entry.get("weight") or 1.0) for name, entry in entities.items()}
    above: dict[str, list[str]] = {}
    for team in active:
        path, at = [team], parent.get(team, "")
        while at and at not in path:
            path.append(at)
            at = parent.get(at, "")
        above[team] = path[::-1]
    alive = {name for path in above.values() for name in path}
    siblings: defaultdict[str, float] = defaultdict(float)
    for name in alive:
        siblings[parent.get(name, "")] += weight.get(name, 1.0)
    shares = {}
    for team, path in above.items():
        share = 1.0
        for name in path:
            share *= weight.get(name, 1.0) / siblings[parent.get(name, "")]
        shares[team] = share
    return shares


def decisions(view: View, round_id: str) -> dict[str, Any]:
    """The decisions that are remembered, one round of them shown; ``round_id`` empty: the newest."""
    changes: dict[str, list[DecisionLine]] = {}
    for line in view.recent.decisions:
        if line.key[0] in view.namespaces:
            changes.setdefault(line.plan_id, []).append(line)
    known: dict[str, RoundLine] = {line.plan_id: line for line in view.recent.rounds if view.policies}
    # At the first look a decision is told as of its job's admission, which may be older.
    times = {plan: max(line.at for line in lines) for plan, lines in changes.items()}
    times |= {plan: line.at for plan, line in known.items()}
    order = sorted(times, key=lambda plan: (times[plan], plan))
    chosen = round_id if round_id in times else (order[-1] if order else "")
    number = order.index(chosen) if chosen else 0
    lines = changes.get(chosen, [])
    return {
        "order": [(plan, times[plan], len(changes.get(plan, ()))) for plan in reversed(order)][:MOST_CHANGES],
        "chosen": chosen,
        "gone": bool(round_id) and round_id != chosen,
        "at": times.get(chosen),
        "round": known.get(chosen),
        "lines": [
            (line, job_link(line.key) if line.key in view.seen.jobs else "") for line in lines[:MOST_CHANGES]
        ],
        "more": max(0, len(lines) - MOST_CHANGES),
        "before": order[number - 1] if number > 0 else "",
        "after": order[number + 1] if number + 1 < len(order) else "",
    }
