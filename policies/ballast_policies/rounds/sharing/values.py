"""Who may share which GPUs."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from ballast_policies.rounds.values import Beside, Placement, RoundState
from ballast_policies.throughput.paired import PairSpeeds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharingJob:
    """A job of exactly one GPU that may share it.

    Attributes:
        kind: equal for jobs that run alike.
        memory: bytes that it needs.
        known_alone: GPU types on which its speed alone is known: by it a pair is judged.
    """

    kind: str
    memory: float
    known_alone: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpus:
    """Who may share which GPUs.

    Attributes:
        jobs: name -> job that may share.
        memory: node -> bytes of its one GPU, for nodes that offer it to two pods.
        speeds: of pairs.
    """

    jobs: Mapping[str, SharingJob] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speeds: PairSpeeds = dataclasses.field(default_factory=PairSpeeds)

    def fit(self, one: str, other: str, node: str) -> bool:
        """Whether both may share, and the node's GPU has memory for the two."""
        first, second = self.jobs.get(one), self.jobs.get(other)
        if first is None or second is None or node not in self.memory:
            return False
        return first.memory + second.memory <= self.memory[node]

    def may_begin(self, one: str, other: str, node: str, gpu_type: str) -> bool:
        """Whether the two fit, and what they do together can be compared with what each does alone."""
        if not self.fit(one, other, node):
            return False
        return gpu_type in self.jobs[one].known_alone and gpu_type in self.jobs[other].known_alone

    def beside(self, job: str, partner: str, gpu_type: str) -> Beside:
        """``job`` beside ``partner``; both may share."""
        kinds = self.jobs[job].kind, self.jobs[partner].kind
        known = self.speeds.relative(*kinds, gpu_type)
        return Beside(partner=partner, speed=known.value, measured=known.measured)

    def together(self, one: str, other: str, gpu_type: str) -> float:
        """The sum of both speeds over those alone: 1 is what they do by turns."""
        return self.beside(one, other, gpu_type).speed + self.beside(other, one, gpu_type).speed

    def on(self, placement: Placement | None) -> str:
        """The node of a job that is alone in its gang on a GPU that may be shared; empty: it is not."""
        if placement is None or len(placement.nodes) != 1 or placement.nodes[0] not in self.memory:
            return ""
        return placement.nodes[0]


def second_jobs(state: RoundState, shared: SharedGpus) -> dict[str, str]:
    """Running job that is second on its GPU -> the first: the one that has been there longer."""
    there: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(state.running, key=lambda name: (state.running_since.get(name, 0.0), name)):
        node = shared.on(state.running[name])
        if node:
            there[node].append(name)
    return {second: names[0] for names in there.values() for second in names[1:]}
