"""A round while it is put together: what it changes for the jobs, and why a gang has its GPUs or waits."""

import dataclasses
import datetime
import functools
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.divisions import waits_for
from ballast_policies.rounds.ledger import Ledger, in_its_pools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import (
    Changes,
    Colocation,
    NodeRequest,
    Placement,
    Round,
    counted,
    largest_domain,
    told,
)

TOLD_APART = "#"
"""Sign in ``Node.taints`` before the number of nodes that more than their taints tells apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Reason for a job's placement, completed once the placement is known.

    Attributes:
        lead: what comes before the job's GPUs, which come before the reason; None: the reason stands alone.
        notes: what else there is to say.
    """

    text: str
    lead: str | None = None
    notes: tuple[str, ...] = ()

    def noted(self, note: str) -> "Reason":
        """The reason with one more note."""
        return Reason(self.text, self.lead, (*self.notes, note))

    def told(self, placement: Placement | None) -> str:
        """The sentence for a job that runs there."""
        text = self.text
        if self.lead is not None and placement is not None:
            gpus = f"{len(placement.nodes)} x {placement.gpu_type} in pool {placement.pool}"
            gpus = str(placement) if placement.parts else gpus
            text = f"{self.lead}{gpus}: {text}"
        return "; ".join((text, *self.notes))


def explain_placement(*, share: float, received_fraction: float, extended: bool) -> Reason:
    """Reason for the GPUs that a gang got."""
    lead = "stays on " if extended else ""
    if share > 0:
        return Reason(f"its share there is {share:.0%} of the time, it has had {received_fraction:.0%}", lead)
    return Reason("no job with a share needs them", lead)


_LAST = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()
"""Latest time that has a text; clocks of simulations may be later."""


def _starting(question: Question, placements: Mapping[str, Placement]) -> dict[str, str]:
    """Pool -> gangs that hold GPUs there and have not done their first step, with since when, as text."""
    found: dict[str, list[str]] = {}
    for name in sorted(placements.keys() & question.state.running.keys(), key=question.state.by_age):
        if question.trains(name) and question.trained(name) <= 0:
            for part in placements[name].by_pool:
                found.setdefault(part.pool, []).append(name)
    texts = {}
    for pool, (first, *others) in found.items():
        since = min(question.state.running_since.get(first, 0.0), _LAST)
        at = datetime.datetime.fromtimestamp(since, datetime.UTC)
        more = f", and {counted(len(others), 'more gang')} later" if others else ""
        texts[pool] = f"{first} has been starting there since {at:%Y-%m-%dT%H:%M:%SZ}{more}"
    return texts


class Explained:
    """Reasons of the gangs that wait after a decision, shared: of thousands most ask for the same."""

    def __init__(
        self,
        question: Question,
        placements: Mapping[str, Placement],
        kept_for: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``kept_for``: pool -> job for which its free GPUs are kept."""
        self._ledger = Ledger(question.nodes, (at.nodes for at in placements.values()))
        self._question, self._kept_for = question, kept_for
        self._starting = _starting(question, placements)
        self._served = frozenset(kept_for.values())
        self._known: dict[tuple[object, ...], Reason] = {}

    def waiting(self, job: Job) -> Reason:
        """Reason that the gang waits."""
        gang = self._question.mixed.get(job.name)
        if gang is not None and self._question.in_several_pools(job.name):
            return Reason(waits_for(gang, self._ledger))
        asks = self._question.asks_of(job.name)
        if job.name in self._served:  # its text alone does not name it
            return Reason(self._waits(job, asks))
        runs = tuple((gpu_type, rate > 0) for gpu_type, rate in job.throughput.items())
        alike = (runs, job.gpus, asks)
        if alike not in self._known:
            self._known[alike] = Reason(self._waits(job, asks))
        return self._known[alike]

    def _waits(self, job: Job, asks: NodeRequest) -> str:
        """Reason that a gang of one pool waits, as text."""
        required, per_pod, left = asks.required, asks.per_pod, self._ledger.left
        usable = sorted(gpu_type for gpu_type, rate in job.throughput.items() if rate > 0)
        if not usable:
            allows = ", ".join(sorted(job.throughput)) or "none of them"
            return f"no GPU type of this policy's pools can run it; it allows {allows}"
        counts = []
        for pool, nodes in sorted(self._ledger.pools.items()):
            gpu_type = nodes[0].gpu_type
            if gpu_type not in usable:
                continue
            within = asks.open(nodes)
            has, free = sum(node.gpus for node in within), sum(left[node.name] for node in within)
            kept = self._kept_for.get(pool, job.name)
            text = f"{free} of {has} {gpu_type} free in pool {pool}"
            if required is not None:
                most, domain = largest_domain(within, left, required, per_pod)
                text += f", at most {most} of them in one domain, {domain}"
            elif per_pod > 1:
                fitting = sum(left[node.name] // per_pod for node in within)
                text += f", room for {counted(fitting, 'pod')}"
            text += f", kept for {kept}" if kept != job.name and free else ""
            text += f", {self._starting[pool]}" if pool in self._starting and free < job.gpus else ""
            closed = Counter(node.closed for node in nodes if node.closed)
            barred = Counter(n.taints for n in nodes if not n.closed and n.taints in asks.barred)
            counts.append(text + barred_nodes(pool, barred, closed))
        where = "; ".join(counts) or f"no node has {' or '.join(usable)}"
        pods = "" if per_pod == 1 else f" in {counted(job.gpus // per_pod, 'pod')} of {per_pod}"
        domain = "" if required is None else f" within one domain of {required.label}"
        return f"waits for {counted(job.gpus, 'GPU')} of one pool{domain}{pods}: {where}"


def barred_nodes(pool: str, barred: Mapping[str, int], closed: Mapping[str, int]) -> str:
    """``; 2 nodes of pool x have taint ...``: nodes that a gang may not be started on; empty: none.

    ``barred``: taints that it does not tolerate -> nodes; ``closed``: why nodes take no gang at all -> nodes.
    """
    texts = [
        f"{counted(count, 'node')} of pool {pool} {'has' if count == 1 else 'have'} taint {taints}, "
        "which the template does not tolerate"
        for taints, count in sorted(barred.items())
        if TOLD_APART not in taints
    ]
    others = sum(count for taints, count in barred.items() if TOLD_APART in taints)
    if others:
        texts.append(
            f"{counted(others, 'node')} of pool {pool} {'is' if others == 1 else 'are'} excluded by the "
            "template's tolerations, nodeSelector, node affinity or requests, or by the memory of their "
            "GPUs, or avoided since its pods did not run there in time"
        )
    texts += [
        f"{counted(count, 'node')} of pool {pool}: {reason}" for reason, count in sorted(closed.items())
    ]
    return "".join(f"; {text}" for text in texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A round while it is put together: every pass returns another one.

    Attributes:
        placements: job -> where it is to run, on GPUs that are its own or that it is the first to have.
        reasons: job -> why.
        seconds: job -> the GPU of another on which it is to run beside that one.
        kept_for: pool -> job for which its free GPUs are kept.
        blocked_by_spot_limit: as of ``Round``.
    """

    question: Question
    placements: Mapping[str, Placement]
    reasons: Mapping[str, Reason]
    seconds: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    kept_for: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocked_by_spot_limit: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def all_placements(self) -> Mapping[str, Placement]:
        """Job -> where it is to run, second jobs as well."""
        return {**self.placements, **self.seconds} if self.seconds else self.placements

    @functools.cached_property
    def changes(self) -> Changes:
        """Changes of the jobs of the question, in their order, and of others that run."""
        found: dict[str, list[str]] = {field.name: [] for field in dataclasses.fields(Changes)}
        ran, names = self.question.state.running, [job.name for job in self.question.jobs]
        for name in (*names, *sorted(ran.keys() - set(names))):
            found[self._change(ran.get(name), self.all_placements.get(name), name)].append(name)
        found["stopped"].sort()
        disturbed, nodes = (*found["moved"], *found["stopped"]), self.question.nodes_by_name
        found["displaced"] = [name for name in disturbed if not in_its_pools(ran[name], nodes)]
        return Changes(**{change: tuple(names) for change, names in found.items()})

    def _change(self, was: Placement | None, now: Placement | None, name: str) -> str:
        if now is None:
            return "waiting" if was is None else "stopped"
        if was is None:
            return "started"
        if now == was:
            return "extended"
        if was.parts and name in self.question.mixed:
            return "resized" if self.question.mixed[name].becomes(was, now) else "moved"
        if name not in self.question.elastic or was.parts or now.parts or was.pool != now.pool:
            return "moved"
        # At the same size it is elsewhere, though by chance its first ranks are where they were.
        least = self.question.least(name, was)
        changes = len(now.nodes) != len(was.nodes) or name in self.question.pending
        gang = self.question.elastic[name]
        changes &= gang.live or gang.becomes(was, now)
        return "resized" if changes and now.nodes[: len(least)] == least else "moved"

    def with_placements(self, placements: Mapping[str, Placement], reasons: Mapping[str, Reason]) -> "Draft":
        """The draft with these jobs there, each for its reason."""
        return dataclasses.replace(
            self,
            placements={**self.placements, **placements},
            reasons={**self.reasons, **reasons},
        )

    def round(self) -> Round:
        """The decision, with its reasons as text."""
        changes = {field.name: getattr(self.changes, field.name) for field in dataclasses.fields(Changes)}
        reasons, nodes = {**self.reasons}, self.question.nodes_by_name
        colocations, placements, shared = dict[str, Colocation](), self.all_placements, self.question.shared
        first_on = shared.first_jobs(self.placements)
        for name, at in self.seconds.items():
            reasons[name] = Reason(f"{at}, which the round gives to another job")
            first = first_on[shared.on(at)]
            if name in shared.jobs and first in shared.jobs:
                colocations[name] = shared.colocation(name, first, at.gpu_type)
                colocations[first] = shared.colocation(first, name, at.gpu_type)
        for name, pair in colocations.items():
            how = "measured" if pair.measured else "estimated"
            reasons[name] = reasons[name].noted(
                f"shares it with {pair.partner}, at {pair.speed:.2f} of its speed alone ({how})"
            )
        for name, asks in self.question.asks.items():
            is_at, asked = placements.get(name), asks.topology
            if asked is not None and name in reasons and is_at is not None and nodes.keys() >= {*is_at.nodes}:
                reasons[name] = reasons[name].noted(told((nodes[node] for node in is_at.nodes), asked))
        return Round(
            placements=placements,
            reasons={name: why.told(placements.get(name)) for name, why in reasons.items()},
            blocked_by_spot_limit=self.blocked_by_spot_limit,
            colocations=colocations,
            **changes,
        )
