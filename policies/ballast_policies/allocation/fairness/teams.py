"""Teams and their rules for dividing volume, and the levels that a stage of water filling gives by them.

Volume is counted in levels (gpus x throughput / throughput of the equal share, without weights). Each
member of the root, an entity or a job on its own, receives volume at the rate of its weight until it
is full. Inside an entity, ``fairness`` divides by the members' weights among those not yet full;
``fifo`` gives all to the first member (in order of arrival) that is not yet full (dissertation
section 5.4.3; entities may lie in entities). An entity that shares by users divides equally between these,
and by its policy between the jobs of each.

Within a team each member has received clip(rate_m y - offset_m, 0, room_m), where y grows with the team's
volume V: under ``fairness`` rate is the weight and V(y) is piecewise linear (it bends where a member is
full); under ``fifo`` rate is 1, y = V, and the offset is the room of those before. So a stage is a short list
of teams and three numbers a job.
"""

import copy
import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.problem import Entity

LATER = 1e-3
"""Part that each next job of a team has of the one before it, with first come first served."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Team:
    """An entity: its own jobs (rows, in order of arrival) and the teams inside it, with their weights."""

    policy: str
    jobs: np.ndarray
    job_weights: np.ndarray
    teams: tuple["Team", ...]
    team_weights: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """(members,) of its jobs and then of the teams inside."""
        return np.concatenate([self.job_weights, self.team_weights])

    def by_member(self, values: np.ndarray) -> np.ndarray:
        """(members,) sums of ``values`` (n,) of jobs over each job and then each team inside."""
        return np.concatenate([values[self.jobs], [team.by_member(values).sum() for team in self.teams]])

    def least(self, volume: np.ndarray, runs: np.ndarray) -> float:
        """The least ``volume`` (n,) per weight of the members with a job that ``runs`` (n,); 0: none has."""
        some = self.by_member(runs.astype(float)) > 0
        return float((self.by_member(volume) / self.weights)[some].min()) if some.any() else 0.0


def flat(instance: Instance) -> Team:
    """A root at which every job stands on its own, with its weight."""
    return Team("fairness", np.arange(len(instance.gpus)), instance.weights, (), np.zeros(0))


def tree(instance: Instance) -> Team:
    """The root over the problem's entities and the jobs that belong to none.

    Where the problem defines no entities, the names that jobs give are entities of weight 1.
    """
    named = (name for name in instance.entity_of if name is not None)
    entities = instance.entities or {name: Entity() for name in named}
    rows: dict[str | None, list[int]] = {name: [] for name in (None, *entities)}
    inside: dict[str | None, list[str]] = {name: [] for name in rows}
    for m in instance.arrival_order().tolist():
        rows[instance.entity_of[m]].append(m)
    for name, entity in entities.items():
        inside[entity.parent].append(name)

    def build(name: str | None) -> Team:
        entity = Entity() if name is None else entities[name]
        teams, each = [build(child) for child in inside[name]], [entities[c].weight for c in inside[name]]
        policy, jobs = entity.policy, rows[name]
        if entity.by_user:
            users: dict[str, list[int]] = {}
            for m in jobs:
                users.setdefault(instance.user_of[m], []).append(m)
            teams += [_of_jobs(policy, own, instance) for own in users.values()]
            policy, jobs, each = "fairness", [], [*each, *[1.0] * len(users)]
        team = _of_jobs(policy, jobs, instance)
        return dataclasses.replace(team, teams=tuple(teams), team_weights=np.array(each, dtype=float))

    return build(None)


def _of_jobs(policy: str, rows: list[int], instance: Instance) -> Team:
    jobs = np.array(rows, dtype=int)
    return Team(policy, jobs, instance.weights[jobs], (), np.zeros(0))


def parts(instance: Instance) -> np.ndarray:
    """Part of the cluster that each job has a claim to (n,), by its team and its team's teams; sums to 1.

    Where a team serves its members first come first served, the first has nearly all of the team's part.
    """
    found = np.zeros(len(instance.gpus))
    _divide(tree(instance), 1.0, found)
    return found / found.sum() if found.sum() > 0 else found


def _divide(team: Team, part: float, found: np.ndarray) -> None:
    inside = [child for child in team.teams if _size(child)]
    weights = [weight for child, weight in zip(team.teams, team.team_weights, strict=True) if _size(child)]
    own = np.concatenate([team.job_weights, np.array(weights, dtype=float)])
    if team.policy == "fifo":
        own = LATER ** np.arange(len(own), dtype=float)
    own = own * part / max(own.sum(), 1e-300)
    found[team.jobs] = own[: len(team.jobs)]
    for child, share in zip(inside, own[len(team.jobs) :].tolist(), strict=True):
        _divide(child, share, found)


def _size(team: Team) -> int:
    return len(team.jobs) + sum(_size(child) for child in team.teams)


@dataclasses.dataclass(slots=True, eq=False)
class _Division:
    """Division of a team's volume: y = interp(V, volumes, times), or y = V where there are none."""

    parent: int
    rate: float
    offset: float
    room: float
    volumes: np.ndarray | None
    times: np.ndarray | None

    def time(self, parent_time: float) -> float:
        """The y of this team at the y of the team above."""
        volume = min(max(self.rate * parent_time - self.offset, 0.0), self.room)
        if self.volumes is None or self.times is None:
            return volume
        return float(np.interp(volume, self.volumes, self.times))


class FillStage:
    """A stage: levels from ``base`` (n,) on, each job with ``left`` (n,) until it is full or stopped.

    Attributes:
        end: when the last member of the root is full.
    """

    def __init__(self, root: Team, base: np.ndarray, left: np.ndarray) -> None:
        self._base, self._left = base, left
        self._rate, self._offset = np.zeros(len(base)), np.zeros(len(base))
        self._team = np.zeros(len(base), dtype=np.intp)
        self._divisions: list[_Division] = []
        rooms, weights = root.by_member(left), root.weights
        self.end = float((rooms / weights).max(initial=0.0))
        self._add(root, rooms, weights, np.zeros(len(rooms)))

    def _add(self, team: Team, rooms: np.ndarray, rates: np.ndarray, offsets: np.ndarray) -> None:
        """The members of the team that was added last, or of the root."""
        here, jobs = len(self._divisions), len(team.jobs)
        self._team[team.jobs] = here
        self._rate[team.jobs], self._offset[team.jobs] = rates[:jobs], offsets[:jobs]
        for child, rate, offset, room in zip(
            team.teams, rates[jobs:], offsets[jobs:], rooms[jobs:], strict=True
        ):
            inside, weights = child.by_member(self._left), child.weights
            fifo = child.policy == "fifo"
            volumes, times = (None, None) if fifo or not len(inside) else _fair_times(weights, inside)
            self._divisions.append(
                _Division(parent=here, rate=rate, offset=offset, room=room, volumes=volumes, times=times)
            )
            before = np.cumsum(inside) - inside if fifo else np.zeros(len(inside))
            self._add(child, inside, np.ones(len(inside)) if fifo else weights, before)

    def of(self, jobs: np.ndarray) -> "FillStage":
        """The same stage, of the levels of ``jobs`` (rows) only."""
        some = copy.copy(self)
        for array in ("_base", "_left", "_rate", "_offset", "_team"):
            setattr(some, array, getattr(self, array)[jobs])
        return some

    def levels(self, s: float, jobs: np.ndarray | None = None) -> np.ndarray:
        """(n,) levels at ``s``, or those of ``jobs`` (rows)."""
        if jobs is not None:
            return self.of(jobs).levels(s)
        times = [s]
        for division in self._divisions:
            times.append(division.time(times[division.parent]))
        levels = self._rate * (s if len(times) == 1 else np.array(times)[self._team])
        levels -= self._offset
        np.clip(levels, 0.0, self._left, out=levels)
        levels += self._base
        found: np.ndarray = levels
        return found


def _fair_times(weights: np.ndarray, rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(volumes, times) of the bends of V(y) = sum_c min(w_c y, room_c)."""
    full_at = rooms / weights
    order = np.argsort(full_at, kind="stable")
    full_at = full_at[order]
    filled = np.cumsum(rooms[order]) - rooms[order]
    rate = np.cumsum(weights[order][::-1])[::-1]
    return np.append(0.0, filled + rate * full_at), np.append(0.0, full_at)
