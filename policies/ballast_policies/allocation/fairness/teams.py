"""Teams and their rules for dividing volume: jobs, entities, and entities in entities.

Volume is counted in levels (gpus x throughput / throughput of the equal share, without weights). Each
member of the root, an entity or a job on its own, receives volume at the rate of its weight until it
is full. Inside an entity, ``fairness`` divides by the members' weights among those not yet full;
``fifo`` gives all to the first member (in order of arrival) that is not yet full (dissertation
section 5.4.3; entities may lie in entities). An entity that shares by users divides equally between these,
and by its policy between the jobs of each.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance

LATER = 1e-3
"""Of what comes first in a team with first come first served, what comes next has this part."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Team:
    """An entity: its own jobs (rows, in order of arrival) and the teams inside it, with their weights."""

    policy: str
    jobs: np.ndarray
    job_weights: np.ndarray
    teams: tuple["Team", ...]
    team_weights: np.ndarray

    def room(self, left: np.ndarray) -> float:
        """Volume that all its jobs together can still take, given the room of each (n,)."""
        return float(left[self.jobs].sum()) + sum(team.room(left) for team in self.teams)


def flat(instance: Instance) -> Team:
    """A root at which every job stands on its own, with its weight."""
    return Team("fairness", np.arange(len(instance.gpus)), instance.weights, (), np.zeros(0))


def tree(instance: Instance) -> Team:
    """The root over the problem's entities and the jobs that belong to none.

    Where the problem defines no entities, the names that jobs give are entities of weight 1.
    """
    order = instance.arrival_order()
    weights, policies, parents = _entities(instance)
    rows: dict[str | None, list[int]] = {name: [] for name in [None, *weights]}
    for m in order:
        rows[instance.entity_of[m]].append(int(m))

    def build(name: str | None) -> Team:
        inside = [child for child, parent in parents.items() if parent == name]
        teams, each = [build(child) for child in inside], [weights[child] for child in inside]
        policy, jobs = "fairness" if name is None else policies[name], rows[name]
        entity = instance.entities.get(name or "")
        if entity is not None and entity.by_user:
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


def _entities(instance: Instance) -> tuple[dict[str, float], dict[str, str], dict[str, str | None]]:
    known = instance.entities
    named = dict.fromkeys(name for name in instance.entity_of if name is not None)
    names = list(known) if known else list(named)
    return (
        {name: known[name].weight if known else 1.0 for name in names},
        {name: known[name].policy if known else "fairness" for name in names},
        {name: known[name].parent if known else None for name in names},
    )
