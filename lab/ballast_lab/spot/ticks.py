"""A replay on a grid of ticks: one job, one gang, zones whose machines come and go, as published traces are.

At a tick machines are taken away, the rule chooses, and what is chosen is paid to the next tick. A launch
takes its start-up, in which nothing is trained; another launch replaces what is left of it. Work is not
lost. Whether a zone has spot machines is seen by asking for them: where there are none that costs nothing;
what is granted and not wanted is paid for ``look_seconds``. So the rule is asked as if all zones that were
not looked at had machines, those it wants are looked at, and it is asked again. An elastic gang takes all
that its zone has of what it asks for: it shrinks at once, and grows as new ranks have started.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from ballast_policies.prices.choice import WAIT, Preferences, Situation, choose
from ballast_policies.prices.hazard import Hazard, RestartCosts
from ballast_policies.prices.options import Options, useful_parts

HOUR = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Zone:
    """A zone with spot machines and others.

    Attributes:
        region: carrying a checkpoint between zones of one costs nothing.
        there: (T,) part of a gang that can be had on spot machines from each tick to the next; 1: all of it.
        spot_usd: (T,) an hour of the gang on them.
        on_demand_usd: an hour of the gang on demand.
    """

    region: str
    there: np.ndarray
    spot_usd: np.ndarray
    on_demand_usd: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TickJob:
    """One job.

    Attributes:
        seconds: of work, on either kind of machines.
        deadline_seconds: after its beginning.
        startup_seconds: of a launch.
        checkpoint_gb: carried between regions.
        tick_seconds: between looks.
        look_seconds: paid for machines that were asked for to see whether they are there; 0: nothing.
        least: the part of its gang on which it may run; 1: all of it.
        exponent: a part of the gang has this power of it as speed.
    """

    seconds: float
    deadline_seconds: float
    startup_seconds: float
    checkpoint_gb: float = 0.0
    tick_seconds: float = 600.0
    look_seconds: float = 60.0
    least: float = 1.0
    exponent: float = 1.0


@dataclasses.dataclass(slots=True, kw_only=True)
class TickResult:
    """Result of the ticks.

    Attributes:
        usd: in all; looks_usd, egress_usd: of that.
        in_time: whether the work was done before the deadline.
        launches, preemptions: how many.
        on_demand_hours: paid.
    """

    usd: float = 0.0
    looks_usd: float = 0.0
    egress_usd: float = 0.0
    in_time: bool = False
    launches: int = 0
    preemptions: int = 0
    on_demand_hours: float = 0.0


def run_ticks(zones: Sequence[Zone], job: TickJob, usd_per_gb: np.ndarray | None = None) -> TickResult:
    """The job by the rule of :mod:`ballast_policies.prices.choice`.

    Args:
        zones: n of them, from the job's beginning to its deadline at least.
        job: what is to do.
        usd_per_gb: (n, n) from zone to zone; None: nothing.
    """
    return _Ticks(zones, job, np.zeros((len(zones), len(zones))) if usd_per_gb is None else usd_per_gb).run()


class _Ticks:
    def __init__(self, zones: Sequence[Zone], job: TickJob, usd_per_gb: np.ndarray) -> None:
        self.zones, self.job, self.n = zones, job, len(zones)
        self.egress = usd_per_gb * job.checkpoint_gb
        self.preferences = Preferences(
            restart=RestartCosts(
                startup_seconds=job.startup_seconds, checkpoint_seconds=0.0, notice_seconds=0.0
            ),
            review_seconds=job.tick_seconds,
        )
        self.spot = np.arange(2 * self.n) < self.n
        self.on_demand = np.array([zone.on_demand_usd for zone in zones])
        self.left, self.at, self.starting, self.where = job.seconds, WAIT, 0.0, -1
        self.held, self.coming, self.joins = 1.0, 0.0, 0.0
        self.parts = np.ones(self.n)
        self.seen = [Hazard() for _ in zones]
        self.since = np.full(self.n, -1)
        self.went = np.zeros(self.n, dtype=bool)
        self.result = TickResult()

    def run(self) -> TickResult:
        length = self.job.tick_seconds
        ticks = math.floor(self.job.deadline_seconds / length + 1e-9)
        for tick in range(ticks):
            option = self._look(tick)
            if option != self.at:
                self._launch(option)
            if self.at != WAIT:
                self._train(tick)
            if self.left <= 1e-6:
                self.result.in_time = True
                break
        return self.result

    def _look(self, tick: int) -> int:
        """Choice at a tick, after what is lost."""
        parts = np.array([float(zone.there[tick]) for zone in self.zones])
        there = parts >= max(self.job.least, 1e-9)
        prices = np.array([float(zone.spot_usd[tick]) for zone in self.zones])
        looked = np.full(self.n, self.job.look_seconds == 0)
        if WAIT != self.at < self.n:
            looked[self.at] = True
            if not there[self.at]:
                self.seen[self.at] = self.seen[self.at].plus(Hazard(preemptions=1))
                self.result.preemptions += 1
                self.at = WAIT
            else:
                self._resize(parts[self.at])
        self.parts = np.where(looked & there, parts, 1.0)
        for zone in np.flatnonzero(looked).tolist():
            self._saw(zone, there[zone], tick)
        while True:
            option = self._choose(tick, np.where(looked & ~there, np.nan, prices), prices)
            if option == WAIT or option >= self.n or looked[option]:
                break
            looked[option] = True
            self.parts[option] = parts[option] if there[option] else self.parts[option]
            self._saw(option, there[option], tick)
        for zone in np.flatnonzero(looked & there).tolist():
            if zone not in (option, self.at):
                usd = prices[zone] * self.parts[zone] * self.job.look_seconds / HOUR
                self.result.usd += usd
                self.result.looks_usd += usd
        return option

    def _trains_on(self) -> np.ndarray:
        """(n,) parts of the gang that would train in each zone."""
        parts = self.parts.copy()
        if WAIT != self.at < self.n:
            parts[self.at] = self.held
        return parts

    def _resize(self, part: float) -> None:
        """Have ``part`` of the gang, which is what the zone has of it."""
        more = max(0.0, part - self.held)
        if more > self.coming:
            self.joins = self.job.startup_seconds
        self.held, self.coming = min(self.held, part), more

    def _saw(self, zone: int, there: bool, tick: int) -> None:
        if there and self.since[zone] < 0:
            self.since[zone] = tick
        elif not there:
            self.went[zone] |= self.since[zone] >= 0
            self.since[zone] = -1

    def _choose(self, tick: int, spot_usd: np.ndarray, listed: np.ndarray) -> int:
        length, of_all = self.job.tick_seconds, Hazard()
        for each in self.seen:
            of_all = of_all.plus(each)
        known = self.went & (self.since >= 0)
        # A part counts as dear as it is fast: what it costs less a step, it takes of the slack.
        speed = self._trains_on() ** self.job.exponent
        options = Options(
            speed=np.concatenate([speed, np.ones(self.n)]),
            usd_per_hour=np.concatenate([spot_usd * speed, self.on_demand]),
            hazard_per_hour=np.array([each.per_hour_in_class(of_all) for each in self.seen] + [0.0] * self.n),
            spot=self.spot,
            there_seconds=np.concatenate(
                [np.where(known, (tick - self.since) * length, np.inf), np.full(self.n, np.inf)]
            ),
            listed_usd_per_hour=np.concatenate([listed * speed, self.on_demand]),
        )
        ticks_left = math.floor(self.job.deadline_seconds / length + 1e-9) - tick
        situation = Situation(
            steps=self.left,
            seconds_to_deadline=ticks_left * length,
            at=self.at,
            starting_seconds=self.starting if self.at != WAIT else 0.0,
            move_usd=np.zeros(2 * self.n) if self.where < 0 else np.tile(self.egress[self.where], 2),
        )
        useful = useful_parts(options, self.preferences.restart)
        return choose(situation, options, self.preferences, useful).option

    def _launch(self, option: int) -> None:
        self.at = option
        if option == WAIT:
            return
        zone = option % self.n
        usd = 0.0 if self.where < 0 else float(self.egress[self.where, zone])
        self.result.usd += usd
        self.result.egress_usd += usd
        self.result.launches += 1
        self.starting = self.job.startup_seconds
        self.held, self.coming = (float(self.parts[zone]) if option < self.n else 1.0), 0.0

    def _train(self, tick: int) -> None:
        length, zone = self.job.tick_seconds, self.at % self.n
        hours = length / HOUR
        if self.at < self.n:
            self.seen[zone] = self.seen[zone].plus(Hazard(hours=hours))
            self.result.usd += float(self.zones[zone].spot_usd[tick]) * hours * (self.held + self.coming)
        else:
            self.result.on_demand_hours += hours
            self.result.usd += self.zones[zone].on_demand_usd * hours
        trains = max(0.0, length - self.starting)
        whole = min(trains, max(0.0, length - self.joins)) if self.coming else 0.0
        speeds = self.held**self.job.exponent, (self.held + self.coming) ** self.job.exponent
        self.left = max(0.0, self.left - (trains - whole) * speeds[0] - whole * speeds[1])
        self.starting, self.joins = max(0.0, self.starting - length), max(0.0, self.joins - length)
        if not self.joins:
            self.held, self.coming = self.held + self.coming, 0.0
        self.where = zone
