"""The replay: jobs choose machines at every review, lose them when the logs say so, and pay by the second."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from ballast_policies.prices.choice import (
    WAIT,
    Choice,
    Preferences,
    Situation,
    choose,
)
from ballast_policies.prices.hazard import Hazard, checkpoint_interval
from ballast_policies.prices.options import Options, useful_parts
from ballast_policies.simulator.clock import OnProgress, SimulationProgress
from ballast_policies.simulator.settings import SettingsError

from ballast_lab.prices.market import Market
from ballast_lab.prices.offers import Pool
from ballast_lab.spot.bounds import on_demand_bound, oracle_usd
from ballast_lab.spot.machines import Machines, machines_of
from ballast_lab.spot.rental import Rental, RentalEnd, run_until
from ballast_lab.spot.result import SpotResult, utc
from ballast_lab.spot.running import Running, arrived, urgency
from ballast_lab.spot.settings import (
    LONGEST_REPLAY_SECONDS,
    NOTICE_SECONDS,
    SpotJob,
    SpotSettings,
)


@dataclasses.dataclass(slots=True)
class Observed:
    """Preemptions and machine hours by pool and by class, which is a GPU type of a cloud.

    Attributes:
        version: rises with every observation.
    """

    pools: dict[Pool, Hazard] = dataclasses.field(default_factory=dict)
    classes: dict[tuple[str, str], Hazard] = dataclasses.field(default_factory=dict)
    version: int = 0

    def add(self, pool: Pool, hazard: Hazard) -> None:
        """Machines of a pool were rented for some time, and perhaps taken away."""
        kind = (pool.cloud, pool.gpu_type)
        self.pools[pool] = self.pools.get(pool, Hazard()).plus(hazard)
        self.classes[kind] = self.classes.get(kind, Hazard()).plus(hazard)
        self.version += 1

    def per_hour(self, pool: Pool) -> float:
        """The rate that is expected of a pool, among those of its class."""
        own = self.pools.get(pool, Hazard())
        return own.per_hour_in_class(self.classes.get((pool.cloud, pool.gpu_type), Hazard()))


BOUND_SLOTS = 4
"""Slots of the lower bound between two reviews: twice as many raised that of three weeks by 0.2 % at most."""

SLOTS_AT_ONCE = 512
"""Reviews for which prices are looked up together."""


def replay(
    market: Market,
    jobs: Sequence[SpotJob],
    settings: SpotSettings,
    *,
    progress: OnProgress | None = None,
) -> SpotResult:
    """Run the jobs, which are in order of arrival, in the market.

    Raises:
        SettingsError: a job can run on no machine of the market, or would take longer than two years; or the
            replay is to start before the first price, or after the last one and the logs of machines.
    """
    start = market.start if settings.start is None else settings.start
    # A price that never changes is one moment.
    last = max([market.end, *(log.end for log in market.availability.values())])
    if not market.start <= start <= last:
        span = f"from {utc(market.start)} to {utc(last)}"
        raise SettingsError(f"start: {utc(start)} is not within the prices, which are {span}")
    end = _horizon(jobs, start, settings)
    machines = machines_of(market, start, end, seed=settings.seed)
    if settings.policy == "on-demand":
        _refuse_without_on_demand(market, jobs)
    return _Replay(market, machines, settings, start, end).run(jobs, progress)


def _refuse_without_on_demand(market: Market, jobs: Sequence[SpotJob]) -> None:
    sold = {offer.gpu_type for offer in market.on_demand}
    for job in jobs:
        if not sold & job.speeds.keys():
            kinds = ", ".join(sorted(job.speeds))
            raise SettingsError(
                f"policy: on-demand, and the prices have no on-demand machine for {job.name}, which runs on "
                f"{kinds}. To fix: name another policy, or add on-demand prices"
            )


def _horizon(jobs: Sequence[SpotJob], start: float, settings: SpotSettings) -> float:
    latest = 0.0
    for job in jobs:
        if not job.speeds:
            raise SettingsError(f"jobs: {job.name} has no speed on any GPU type of the prices")
        alone = job.steps / min(job.speeds.values())
        latest = max(latest, job.arrival + 2 * alone + (job.deadline_seconds or 0.0))
    latest += 30 * 86400.0
    if settings.quota:
        latest += sum(job.steps / min(job.speeds.values()) for job in jobs)
    return start + min(latest, LONGEST_REPLAY_SECONDS)


class _Replay:
    def __init__(
        self, market: Market, machines: Machines, settings: SpotSettings, start: float, end: float
    ) -> None:
        self.market, self.machines, self.settings = market, machines, settings
        self.start, self.end = start, end
        self.preferences: Preferences = settings.preferences
        self.spot = machines.spot
        self.observed = Observed()
        self.used: dict[str, int] = {}
        self._chunk: tuple[int, np.ndarray] = (-1, np.empty((0, 0)))
        self._seen: tuple[float, np.ndarray, np.ndarray] = (-math.inf, np.empty(0), np.empty(0))

    def run(self, jobs: Sequence[SpotJob], progress: OnProgress | None) -> SpotResult:
        waiting = list(jobs)[::-1]
        active: list[Running] = []
        done: list[Running] = []
        slot = 0
        review = self.settings.review_seconds
        while waiting or active:
            if not active:
                slot = max(slot, math.floor(waiting[-1].arrival / review))
            now = self.start + slot * review
            if now >= self.end:
                names = ", ".join(each.job.name for each in active[:3]) or waiting[-1].name
                raise SettingsError(f"jobs: not done after {(now - self.start) / 86400:.0f} days: {names}")
            while waiting and waiting[-1].arrival < (slot + 1) * review:
                active.append(arrived(waiting.pop(), self.machines, self.start))
            prices = self._prices(slot)
            for each in sorted(active, key=urgency):
                if each.outcome.arrival > now:
                    here = self.machines.prices(np.array([each.outcome.arrival]))[0]
                    self._tick(each, each.outcome.arrival, now + review, here)
                else:
                    self._tick(each, now, now + review, prices)
            finished = [each for each in active if each.steps <= 0]
            if finished:
                done += finished
                active = [each for each in active if each.steps > 0]
            slot += 1
            if progress is not None:
                idle = sum(each.rental is None for each in active)
                progress(
                    SimulationProgress(
                        seconds=slot * review,
                        done=len(done),
                        total=len(jobs),
                        present=len(active),
                        waiting=idle,
                    )
                )
        order = {job.name: number for number, job in enumerate(jobs)}
        done.sort(key=lambda each: order[each.job.name])
        return SpotResult(
            settings=self.settings,
            start=self.start,
            outcomes=tuple(each.outcome for each in done),
            hazards={str(pool): hazard for pool, hazard in sorted(self.observed.pools.items())},
            outliers=self.market.outliers,
            ignored=self.market.ignored,
        )

    def _prices(self, slot: int) -> np.ndarray:
        """(K,) at the beginning of a slot."""
        chunk = slot // SLOTS_AT_ONCE
        if self._chunk[0] != chunk:
            times = (
                self.start + (chunk * SLOTS_AT_ONCE + np.arange(SLOTS_AT_ONCE)) * self.settings.review_seconds
            )
            self._chunk = (chunk, self.machines.prices(times))
        prices: np.ndarray = self._chunk[1][slot - chunk * SLOTS_AT_ONCE]
        return prices

    def _tick(self, each: Running, now: float, until: float, prices: np.ndarray) -> None:
        """One job from a review to the next; where it loses its machines, it looks for others at once."""
        while now < until and each.steps > 0:
            self._review(each, now, prices)
            if each.rental is None:
                return
            ended = run_until(each.rental, until, each.steps)
            each.steps = ended.steps
            if ended.cause is None:
                return
            self._close(each, ended)
            now = ended.at
            if each.steps > 0:
                prices = self.machines.prices(np.array([now]))[0]

    def _review(self, each: Running, now: float, prices: np.ndarray) -> None:
        options = self._options(each, now, prices)
        at = WAIT if each.rental is None else each.rental.option
        deadline = each.job.deadline_seconds if self.settings.reads_deadlines else None
        situation = Situation(
            steps=each.steps,
            seconds_to_deadline=None if deadline is None else each.outcome.arrival + deadline - now,
            at=at,
            starting_seconds=0.0 if each.rental is None else max(0.0, each.rental.trains_from - now),
            waited_seconds=0.0 if each.rental is not None else now - each.idle_since,
            move_usd=each.move_usd(self.machines, self.settings),
        )
        choice = choose(situation, options, self.preferences, each.useful)
        if choice.option == at:
            return
        if each.rental is not None:
            ended = each.rental.left(now, each.steps)
            each.steps = ended.steps
            self._close(each, ended)
            each.outcome.moves += 1
            now = ended.at
        if choice.option != WAIT:
            self._start(each, choice, now)

    def _options(self, each: Running, now: float, prices: np.ndarray) -> Options:
        if self._seen[0] != now:
            self._seen = now, self.machines.listed(now), self.machines.there_seconds(now, self.start)
        _, listed, there = self._seen
        usd = prices[each.offers] * each.machines
        if self.settings.quota:
            usd = np.where(each.within(self.settings.quota, self.used, self.machines), usd, np.nan)
        spot, stale = self.spot[each.offers], each.seen != self.observed.version
        if stale:
            each.hazards = np.array(
                [
                    self.observed.per_hour(self.machines.offers[k].pool) if self.spot[k] else 0.0
                    for k in each.offers.tolist()
                ]
            )
        options = Options(
            speed=each.speed,
            usd_per_hour=usd,
            hazard_per_hour=each.hazards,
            spot=spot,
            there_seconds=there[each.offers],
            listed_usd_per_hour=listed[each.offers] * each.machines,
        )
        if stale:
            each.useful, each.seen = useful_parts(options, self.preferences.restart), self.observed.version
        return options

    def _start(self, each: Running, choice: Choice, now: float) -> None:
        k = int(each.offers[choice.option])
        offer = self.machines.offers[k]
        count = int(each.machines[choice.option])
        carried = float(each.move_usd(self.machines, self.settings)[choice.option])
        each.outcome.usd += carried
        each.outcome.egress_usd += carried
        each.region = (offer.cloud, offer.region)
        notice = self.settings.notice_seconds
        hazard = self.observed.per_hour(offer.pool) if offer.spot else 0.0
        each.rental = Rental(
            option=choice.option,
            offer=k,
            reason=choice.reason,
            gpu_type=offer.gpu_type,
            gpus=count * offer.gpus,
            granted=now,
            trains_from=now + self.settings.launch_seconds,
            lost_at=self.machines.lost_at(k, now),
            steps_per_second=float(each.speed[choice.option]),
            interval=checkpoint_interval(hazard, self.preferences.restart),
            checkpoint_seconds=self.settings.checkpoint_seconds,
            notice_seconds=NOTICE_SECONDS.get(offer.cloud, 30.0) if notice is None else notice,
        )
        self.used[offer.gpu_type] = self.used.get(offer.gpu_type, 0) + each.rental.gpus

    def _close(self, each: Running, ended: RentalEnd) -> None:
        """Pay for the machines and book what happened."""
        rental = each.rental
        assert rental is not None
        offer = self.machines.offers[rental.offer]
        count = int(each.machines[rental.option])
        self.used[rental.gpu_type] -= rental.gpus
        usd = count * self.machines.series[rental.offer].usd_between(rental.granted, ended.at)
        each.outcome.book(offer, rental, ended, usd)
        if offer.spot:
            hours = (ended.at - rental.granted) / 3600.0
            self.observed.add(offer.pool, Hazard(preemptions=int(ended.cause == "preempted"), hours=hours))
        each.rental, each.idle_since = None, ended.at
        if each.steps <= 0:
            self._finish(each, ended.at)

    def _finish(self, each: Running, now: float) -> None:
        each.outcome.finish = now
        restart = self.preferences.restart
        on_demand = ~self.spot[each.offers]
        usd = np.array(
            [self.market.on_demand.get(self.machines.offers[k], math.nan) for k in each.offers.tolist()]
        )
        each.outcome.on_demand = on_demand_bound(
            each.job, each.speed[on_demand], (usd * each.machines)[on_demand], restart
        )
        if self.settings.oracle:
            until = max(now, each.outcome.arrival + (each.job.deadline_seconds or 0.0))
            each.outcome.oracle_usd = oracle_usd(
                each.job,
                self.machines,
                each.offers,
                each.machines,
                each.speed,
                start=each.outcome.arrival,
                until=until,
                slot_seconds=self.settings.review_seconds / BOUND_SLOTS,
                startup_seconds=self.settings.launch_seconds,
            )
