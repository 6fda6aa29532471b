"""The choice where one job should run now, of all that can be rented, and whether it should move there.

The allocation of section 6.4 for a job alone, under prices that change: of the offers that are fast
enough to keep the deadline, the one whose steps cost least, expected losses included.  With constant prices
that is the linear program's optimum, "fast first": the needed speed falls while the job is ahead,
until the next cheaper offer is fast enough.  On-demand machines are the safety net ("Can't Be Late", NSDI
2024): a job moves there at the last moment from which it is sure to be done in time.
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from ballast_policies.prices.hazard import RestartCosts, checkpoint_interval, saving_part
from ballast_policies.prices.options import Options, on_hull, usd_per_step

WAIT = -1
"""Instead of an offer: rent nothing now."""

RESERVE = 0.1
"""Part of the time until a deadline that is not waited away while there is slack: it pays for the starts of
later changes between spot machines and others. From 0.1 to 0.2 it makes no
difference that could be told, on every third of the first 75 windows of "Can't Be Late"."""

SETTLED_HOURS = 1.0
"""Hours: what came back less than this ago is expected to last as long again as it has; later, at least as
long as its rate of preemptions says."""

_NEVER = 1e-9
"""Preemptions an hour, once in a hundred thousand years, up to which there are none."""

Reason = Literal["cheapest", "deadline", "stay", "no spot", "wait"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The job.

    Attributes:
        steps: left to do, above 0.
        seconds_to_deadline: None: it has none, or its policy reads none.
        at: the option on which it runs; :data:`WAIT`: none.
        starting_seconds: until the machines that it is on do its first step.
        move_usd: to carry its data to another region; (k,) or one number for all.
    """

    steps: float
    seconds_to_deadline: float | None = None
    at: int = WAIT
    waited_seconds: float = 0.0
    starting_seconds: float = 0.0
    move_usd: "float | np.ndarray" = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Preferences between price and risk.

    Attributes:
        restart: costs of starting, saving and losing machines.
        hysteresis: a move has to save this many times its cost.
        price_hours: how long a price difference is trusted to last: they change about once a day (6.1).
        speed_margin: an offer that the job is not on counts as fast enough when it is so much faster than the
            deadline needs: what a few preemptions take does not send the job back and forth.
        patience_seconds: how long a job without a deadline waits for spot machines before it runs on demand.
        may_use_spot: else on demand only.
    """

    restart: RestartCosts = dataclasses.field(default_factory=RestartCosts)
    review_seconds: float = 600.0
    hysteresis: float = 1.0
    price_hours: float = 24.0
    speed_margin: float = 0.08
    patience_seconds: float = 4 * 3600.0
    may_use_spot: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An option, or :data:`WAIT`, and why."""

    option: int
    reason: Reason


def choose(situation: Situation, options: Options, preferences: Preferences, useful: np.ndarray) -> Choice:
    """The option for the time until the next review.

    ``useful``: :func:`~ballast_policies.prices.options.useful_parts` of the options.
    """
    cost = usd_per_step(options, useful)
    if not preferences.may_use_spot:
        cost = np.where(options.spot, np.inf, cost)
    if not np.isfinite(cost).any():
        return Choice(WAIT, "wait")
    carried = cost + _carrying(situation, options, preferences, useful)
    needed = 0.0
    if situation.seconds_to_deadline is not None:
        if _must_be_sure(situation, options, preferences):
            return _surest(situation, options, preferences, cost)
        needed = _needed_rate(situation, options, preferences)
    at, rate = situation.at, np.where(np.isfinite(cost), options.speed * useful, 0.0)
    spot_there = bool((options.spot & np.isfinite(cost)).any())
    may_wait = preferences.may_use_spot and at == WAIT
    if may_wait and _waits(situation, options, preferences, carried, useful):
        return Choice(WAIT, "wait")
    best = _cheapest_fast_enough(at, options, preferences, carried, rate, needed)
    if best == at:
        return Choice(at, "stay")
    if not _may_start(best, situation, options, preferences):
        if at != WAIT and np.isfinite(cost[at]):
            return Choice(at, "stay")
        return _surest(situation, options, preferences, cost)
    enough = rate[at] >= min(needed, rate[best]) * (1 - 1e-9)
    may_stay = enough or not _gains_time(situation, options, preferences, rate, best)
    may_stay = may_stay and at != WAIT and rate[at] > 0
    if may_stay and not _worth_moving(situation, options, preferences, cost, rate, best):
        return Choice(at, "stay")
    if preferences.may_use_spot and not spot_there:
        return Choice(best, "no spot")
    return Choice(best, "cheapest")


def _cheapest_fast_enough(
    at: int, options: Options, preferences: Preferences, cost: np.ndarray, rate: np.ndarray, needed: float
) -> int:
    """The option with the cheapest steps of those fast enough.

    Where no spot machine is, the cheapest of the fastest spot machines: the safety net is still there, and
    on-demand machines are for its moment, unless their steps are the cheapest anyway.
    """
    margin = np.full(len(rate), 1 + preferences.speed_margin)
    if at != WAIT:
        margin[at] = 1.0
    # What is as fast as anything on demand is fast enough while the deadline is safe: losses cost slack, and
    # the safety net comes when that is used up.
    sure = float(np.where(options.spot, 0.0, options.speed).max(initial=0.0))
    fast = (rate >= needed * margin) | ((rate > 0) & (options.speed >= sure) & (sure > 0))
    # A mix of two others has the same speed as an option above their line, and costs less.
    best = fast & on_hull(rate, cost)
    enough = best if best.any() else fast
    spot = options.spot & np.isfinite(cost)
    if preferences.may_use_spot and spot.any() and not (fast & spot).any():
        enough = spot & (options.speed >= options.speed[spot].max() * (1 - 1e-9)) | enough
    if not enough.any():
        enough = rate >= rate.max() * (1 - 1e-9)
    return int(np.argmin(np.where(enough, cost, np.inf)))


def _needed_rate(situation: Situation, options: Options, preferences: Preferences) -> float:
    """Steps/s with which the job is done before the safety net would stop it, if it starts now."""
    reserve = _reserve(situation, options, preferences) + preferences.restart.checkpoint_seconds
    left = (situation.seconds_to_deadline or 0.0) - 2 * preferences.restart.startup_seconds - reserve
    return situation.steps / left if left > 0 else math.inf


def seconds_on_demand(situation: Situation, options: Options, restart: RestartCosts) -> np.ndarray:
    """(k,) seconds to the end on each on-demand option, start-up included unless the job is there already."""
    sure = ~options.spot & (options.speed > 0) & ~np.isnan(options.usd_per_hour)
    saved = 0.0 if situation.at == WAIT else restart.checkpoint_seconds
    startup = np.full(len(options.speed), restart.startup_seconds + saved)
    if situation.at != WAIT:
        startup[situation.at] = 0.0
    found: np.ndarray = np.where(
        sure, startup + situation.steps / np.where(sure, options.speed * saving_part(restart), 1.0), np.inf
    )
    return found


def _must_be_sure(situation: Situation, options: Options, preferences: Preferences) -> bool:
    """True if this is the last review from which an on-demand machine surely keeps the deadline.

    Until the next review nothing may get done, and work since the last checkpoint may be lost; then a
    machine has to start.
    """
    return _slack_seconds(situation, options, preferences) <= 0


def _slack_seconds(situation: Situation, options: Options, preferences: Preferences) -> float:
    """Seconds until that review, for a job with a deadline."""
    least = dataclasses.replace(situation, at=WAIT)
    fastest = float(seconds_on_demand(least, options, preferences.restart).min(initial=math.inf))
    used = fastest + preferences.restart.checkpoint_seconds + _reserve(situation, options, preferences)
    return (situation.seconds_to_deadline or 0.0) - used


def _may_start(best: int, situation: Situation, options: Options, preferences: Preferences) -> bool:
    """True if the deadline stays safe through the start-up there, and the save before it."""
    if situation.seconds_to_deadline is None or not options.spot[best]:
        return True
    restart = preferences.restart
    saved = restart.checkpoint_seconds if situation.at != WAIT else 0.0
    there = dataclasses.replace(
        situation,
        at=best,
        starting_seconds=restart.startup_seconds,
        seconds_to_deadline=situation.seconds_to_deadline - saved,
    )
    return not _must_be_sure(there, options, preferences)


def _reserve(situation: Situation, options: Options, preferences: Preferences) -> float:
    """Seconds that may be lost, against the fastest on-demand machine, before the job can choose again.

    A job that loses its machines chooses at once. Until then it loses the start-up, what it is slower than
    that machine until the next review, and, where the notice is too short to save, the work since its last
    checkpoint.
    """
    restart, at = preferences.restart, situation.at
    rates = options.hazard_per_hour
    rate = float(rates[at]) if at != WAIT else float(rates.max(initial=0.0))
    noticed = restart.notice_seconds >= restart.checkpoint_seconds
    lost = restart.checkpoint_seconds if noticed else checkpoint_interval(rate, restart)
    if at == WAIT:
        pauses = restart.checkpoint_seconds / (
            checkpoint_interval(rate, restart) + restart.checkpoint_seconds
        )
        return restart.startup_seconds + lost + preferences.review_seconds * pauses
    sure = float(options.speed[~options.spot].max(initial=0.0)) * saving_part(restart)
    interval = checkpoint_interval(rate, restart)
    training = float(options.speed[at]) * interval / (interval + restart.checkpoint_seconds)
    slower = max(0.0, 1.0 - training / sure) if sure > 0 else 1.0
    return (
        situation.starting_seconds + preferences.review_seconds * slower + (lost if options.spot[at] else 0)
    )


def _surest(situation: Situation, options: Options, preferences: Preferences, cost: np.ndarray) -> Choice:
    """The cheapest on-demand option that keeps the deadline; where none does, the fastest of all."""
    seconds = seconds_on_demand(situation, options, preferences.restart)
    left = situation.seconds_to_deadline or 0.0
    at = situation.at
    if at != WAIT and seconds[at] <= left:
        return Choice(at, "stay")
    if (seconds <= left).any():
        return Choice(int(np.argmin(np.where(seconds <= left, cost, np.inf))), "deadline")
    fastest = np.where(np.isfinite(cost), options.speed, 0.0)
    if at != WAIT and fastest[at] >= fastest.max() * (1 - 1e-9):
        return Choice(at, "stay")
    quick = fastest >= fastest.max() * (1 - 1e-9)
    return Choice(int(np.argmin(np.where(quick, cost, np.inf))), "deadline")


def _carrying(
    situation: Situation, options: Options, preferences: Preferences, useful: np.ndarray
) -> np.ndarray:
    """(k,) USD a step of what has to be carried to an offer, over the steps that are expected there."""
    hours = np.array([_lifetime_hours(options, preferences, k) for k in range(len(options.speed))])
    there = np.where(options.spot, options.speed * useful * hours * 3600.0, np.inf)
    steps = np.maximum(np.minimum(situation.steps, np.nan_to_num(there, nan=0.0)), 1e-9)
    found: np.ndarray = np.broadcast_to(situation.move_usd, steps.shape) / steps
    return found


def _waits(
    situation: Situation, options: Options, preferences: Preferences, cost: np.ndarray, useful: np.ndarray
) -> bool:
    """True if spot machines that cannot be had now are worth waiting for.

    Before a deadline they are where all that can be had costs more a step: twice as much while the slack is
    little more than what is kept of it, less where there is more to wait in.
    """
    if not (options.spot & (options.speed > 0)).any():
        return False
    none = not (options.spot & np.isfinite(cost)).any()
    if situation.seconds_to_deadline is None:
        return none and situation.waited_seconds < preferences.patience_seconds
    fastest = float(seconds_on_demand(situation, options, preferences.restart).min(initial=math.inf))
    slack, kept = situation.seconds_to_deadline - fastest, RESERVE * situation.seconds_to_deadline
    if slack <= max(preferences.review_seconds, kept):
        return False
    if options.listed_usd_per_hour is None:
        return none
    listed = dataclasses.replace(options, usd_per_hour=options.listed_usd_per_hour)
    usual = usd_per_step(listed, useful) + situation.move_usd / situation.steps
    least = np.where(options.spot, usual, np.inf).min(initial=math.inf)
    return bool(cost.min(initial=math.inf) > (1 + kept / slack) * least)


def _worth_moving(
    situation: Situation,
    options: Options,
    preferences: Preferences,
    cost: np.ndarray,
    rate: np.ndarray,
    best: int,
) -> bool:
    """True if the expected saving is ``hysteresis`` times the cost of the move: save, carry, start."""
    at, restart = situation.at, preferences.restart
    left = situation.steps / rate[best] / 3600.0
    lasts = _lifetime_hours(options, preferences, best)
    saving = (cost[at] - cost[best]) * rate[best] * 3600.0 * min(left, preferences.price_hours, lasts)
    carried = float(np.broadcast_to(situation.move_usd, cost.shape)[best])
    startup = restart.startup_seconds / 3600.0
    moving = (
        options.usd_per_hour[best] * startup
        + options.usd_per_hour[at] * restart.checkpoint_seconds / 3600.0
        + carried
    )
    if situation.seconds_to_deadline is not None and options.spot[best]:
        sure = np.where(options.spot, np.inf, cost).min(initial=math.inf)
        premium = max(0.0, float(sure - cost[at])) * rate[best] * 3600.0
        moving += _scarce_slack_usd(situation, options, preferences, premium=premium, left=left)
    back = options.usd_per_hour[at] * startup if lasts < left else 0.0
    return bool(saving > preferences.hysteresis * moving + back)


def _gains_time(
    situation: Situation, options: Options, preferences: Preferences, rate: np.ndarray, best: int
) -> bool:
    """True if more steps are done there, save and start included, while the offer is expected to last."""
    at, restart = situation.at, preferences.restart
    seconds = min(situation.steps / rate[best], 3600.0 * _lifetime_hours(options, preferences, best))
    paused = restart.startup_seconds + restart.checkpoint_seconds
    return bool((rate[best] - rate[at]) * seconds > rate[best] * paused)


def _scarce_slack_usd(
    situation: Situation, options: Options, preferences: Preferences, *, premium: float, left: float
) -> float:
    """USD that a start is expected to cost before a deadline by the slack it takes from later ones.

    With slack for m starts, and losses that come as a Poisson process of rate r, the job runs on demand
    from the m-th loss to its end. One start less brings that forward to the loss before: at each hour t of
    the hours ``left`` the ``premium``, USD that an hour on demand costs more, is paid with probability
    P(N(t) = m - 1), whose integral is the regularized incomplete gamma function P(m, r * left) / r.
    """
    hazard = float(options.hazard_per_hour[options.spot].mean())
    paused = preferences.restart.startup_seconds + preferences.restart.checkpoint_seconds
    if not math.isfinite(premium) or hazard <= _NEVER or paused <= 0:
        return 0.0
    from scipy.special import gammainc

    starts = _slack_seconds(situation, options, preferences) / paused
    return float(premium * gammainc(max(starts, 1e-9), hazard * left) / hazard)


def _lifetime_hours(options: Options, preferences: Preferences, k: int) -> float:
    """Hours that an offer is expected to last.

    Lives of spot machines have long tails: what comes and goes is expected to last as long again as it has,
    so a job that runs elsewhere lets it prove itself first.
    """
    rate = float(options.hazard_per_hour[k])
    expected = 1.0 / rate if rate > _NEVER else math.inf
    if options.there_seconds is not None and math.isfinite(options.there_seconds[k]):
        been = float(options.there_seconds[k] + preferences.review_seconds) / 3600.0
        return been if been <= SETTLED_HOURS else max(been, expected)
    return expected
