"""The levels of all jobs along a stage of water filling, as functions of one number.

A member of the root receives volume at the rate of its weight until it is full. Within a team each member
has received clip(rate_m y - offset_m, 0, room_m), where y grows with the team's volume V: under ``fairness``
rate is the weight and V(y) is piecewise linear (it bends where a member is full); under ``fifo`` rate is 1,
y = V, and the offset is the room of those before. So a stage is a short list of teams and three numbers a
job, and the levels at any point, also of some jobs only, take one pass over arrays.
"""

import copy
import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.teams import Team


@dataclasses.dataclass(slots=True, eq=False)
class _Division:
    """How a team divides its volume: y = interp(V, volumes, times), or y = V where there are none."""

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
        rooms, weights = _rooms(root, left), np.concatenate([root.job_weights, root.team_weights])
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
            inside = _rooms(child, self._left)
            weights = np.concatenate([child.job_weights, child.team_weights])
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


def _rooms(team: Team, left: np.ndarray) -> np.ndarray:
    """(members,) volume that each job and then each team inside can still take."""
    return np.concatenate([left[team.jobs], [inside.room(left) for inside in team.teams]])


def _fair_times(weights: np.ndarray, rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(volumes, times) of the bends of V(y) = sum_c min(w_c y, room_c)."""
    full_at = rooms / weights
    order = np.argsort(full_at, kind="stable")
    full_at = full_at[order]
    filled = np.cumsum(rooms[order]) - rooms[order]
    rate = np.cumsum(weights[order][::-1])[::-1]
    return np.append(0.0, filled + rate * full_at), np.append(0.0, full_at)
