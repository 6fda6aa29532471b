"""Who gets which part of what is poured into a cluster: jobs, their teams, and teams of teams.

Volume is counted in levels (gpus x throughput / throughput of the equal share, without weights). Each
member of the root, an entity or a job on its own, receives volume at the rate of its weight until it
is full. Inside an entity, ``fairness`` divides by the members' weights among those not yet full;
``fifo`` gives all to the first member (in order of arrival) that is not yet full (dissertation
section 5.4.3; entities may lie in entities).
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Team:
    """An entity: its own jobs (rows, in order of arrival) and the teams inside it, with their weights."""

    policy: str
    jobs: np.ndarray
    job_weights: np.ndarray
    teams: tuple["Team", ...]
    team_weights: np.ndarray

    def room(self, left: np.ndarray) -> float:
        """Volume that all its jobs together can still take, given what each can (n,)."""
        return float(left[self.jobs].sum()) + sum(team.room(left) for team in self.teams)

    def pour(self, volume: float, left: np.ndarray, given: np.ndarray) -> None:
        """Divide ``volume`` among the members; adds to ``given`` (n,)."""
        rooms = np.concatenate([left[self.jobs], [team.room(left) for team in self.teams]])
        if self.policy == "fifo":
            before = np.concatenate([[0.0], np.cumsum(rooms)[:-1]]) if len(rooms) else rooms
            parts = np.clip(volume - before, 0.0, rooms)
        else:
            parts = divide(volume, np.concatenate([self.job_weights, self.team_weights]), rooms)
        self._hand_on(parts, left, given)

    def pour_at_rates(self, time: float, left: np.ndarray, given: np.ndarray) -> None:
        """As the root: every member receives its weight times ``time``, as far as it has room."""
        rooms = np.concatenate([left[self.jobs], [team.room(left) for team in self.teams]])
        weights = np.concatenate([self.job_weights, self.team_weights])
        self._hand_on(np.minimum(weights * time, rooms), left, given)

    def _hand_on(self, parts: np.ndarray, left: np.ndarray, given: np.ndarray) -> None:
        given[self.jobs] += parts[: len(self.jobs)]
        for team, part in zip(self.teams, parts[len(self.jobs) :], strict=True):
            team.pour(float(part), left, given)


def divide(volume: float, weights: np.ndarray, rooms: np.ndarray) -> np.ndarray:
    """Parts w_c y, cut at the rooms, with the y at which they sum to ``volume`` (or all rooms full)."""
    if volume >= rooms.sum():
        return rooms.copy()
    full_at = rooms / weights
    order = np.argsort(full_at, kind="stable")
    filled = np.concatenate([[0.0], np.cumsum(rooms[order])[:-1]])
    rate = np.cumsum(weights[order][::-1])[::-1]
    # Before the member order[i] is full, volume(y) = filled[i] + rate[i] y; the first i with room decides.
    i = int(np.searchsorted(filled + rate * full_at[order], volume))
    i = min(i, len(order) - 1)
    given: np.ndarray = np.minimum(weights * ((volume - filled[i]) / rate[i]), rooms)
    return given


def flat(problem: Instance) -> Team:
    """A root at which every job stands on its own, with its weight."""
    return Team("fairness", np.arange(len(problem.gpus)), problem.weights, (), np.zeros(0))


def tree(problem: Instance) -> Team:
    """The root over the problem's entities and the jobs that belong to none.

    Where the problem defines no entities, the names that jobs give are entities of weight 1.
    """
    order = problem.arrival_order()
    weights, policies, parents = _entities(problem)
    rows: dict[str | None, list[int]] = {name: [] for name in [None, *weights]}
    for m in order:
        rows[problem.entity_of[m]].append(int(m))

    def build(name: str | None) -> Team:
        inside = [child for child, parent in parents.items() if parent == name]
        jobs = np.array(rows[name], dtype=int)
        return Team(
            "fairness" if name is None else policies[name],
            jobs,
            problem.weights[jobs],
            tuple(build(child) for child in inside),
            np.array([weights[child] for child in inside], dtype=float),
        )

    return build(None)


def _entities(problem: Instance) -> tuple[dict[str, float], dict[str, str], dict[str, str | None]]:
    known = problem.entities
    named = dict.fromkeys(name for name in problem.entity_of if name is not None)
    names = list(known) if known else list(named)
    return (
        {name: known[name].weight if known else 1.0 for name in names},
        {name: known[name].policy if known else "fairness" for name in names},
        {name: known[name].parent if known else None for name in names},
    )
