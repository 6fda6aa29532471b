"""Water filling with thousands of jobs: at most one stage for each GPU type, each in the types' prices.

When a stage ends, the types with a price are full, and every job that needs them to reach its level can get
no more: it keeps its GPUs. What remains is a smaller problem on the other types, in which
a job may rise as far as these types take it. So there are no more stages than types, where one linear program
for each level would be thousands.

A job that stops keeps its shares on the full types and, for the rest of its time, its fastest other type:
complementary slackness leaves it no other choice. That is checked for the few jobs that are indifferent
between three types or more; where ties leave a choice, there is no answer.

One stage: how far can the levels rise? Given s, which part u of the types that have prices do the demands
take (``stage_jobs``, ``least_utilization``)? The s at which u = 1 is found from above by Newton's method:
the prices at a trial s prove that lambda . demand <= cut for every allocation; the root of that cut is a
bound and the next trial.

Which types limit is guessed from a sample (``adjusted_prices``). Types that limit and were left out show as
soon as the jobs of the next stage do not fit (``MoreTypesError``); types that do not limit get the price 0.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.stage_jobs import PricedJobs, StageJobs, stage_columns, stopped_jobs
from ballast_policies.allocation.fairness.teams import FillStage, Team
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import CERTIFIED_GAP, Answer
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.least_utilization import Utilization, least_utilization
from ballast_policies.allocation.solvers.simplex import SOLVER, SolverError

SAMPLE = 2500
ROUGH_JOBS = 10_000
"""Jobs that stand for all where about the end of the stage is looked for, at most."""
CLOSE = 1e-9
"""u counts as 1 within this."""
JITTERED = 1e-6
"""u may differ from 1 by this where s is its own bound: ``box_search`` breaks ties by changes of 1e-7."""
LIMITING = 3e-4
"""Part of the worth of all GPUs from which on a type may limit."""
UNPRICED = 1e-6
"""Part of the highest price below which a type does not limit: more than broken ties change prices by."""
ROUGH = 0.005
"""The s at which exact solving begins is right to about this part."""
FIRST_TRIALS, NEAR, AT_START = 0.005, 0.001, 0.01
"""Prices of a sample's trials are right to this part, of all jobs far from the end, and at the start."""
FAR, MANY = 0.003, 10_000
"""Error of prices that may remain there, and the number of jobs that make it worth while."""
ROUGH_TRIALS, TRIALS = 10, 30
ADJUSTMENTS = 30
FIRST_STEP = 0.3
LONGER, SHORTER = 1.4, 0.5
SHORTEST, LONGEST = 0.05, 2.0
LEAST_PART, GREATEST_PART = 0.01, 4.0
"""The demand for a type, relative to the mean, counts as at least and at most this."""
FIRST_BOX = 0.05
"""Largest error of prices after a sample."""
WIDE, NARROW = 0.3, 1e-7
"""Errors of prices, the largest and the least."""


class MoreTypesError(Exception):
    """The jobs do not fit at their present levels; ``types`` (k,) limit but have the price 0."""

    def __init__(self, types: np.ndarray) -> None:
        super().__init__(types)
        self.types = types


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageEnd:
    """End of a stage, with the proof that it goes no further.

    Attributes:
        s: the end of the stage.
        bound: proven: no s beyond it.
        prices: (k,) of the types that limit: how much further the stage would go with one GPU more.
        X: (n, w) shares; the rest of a job's demand is met in its fastest column without a price.
        stopped: (n,) jobs that cannot rise beyond ``s``, whose X is final.
    """

    s: float
    bound: float
    prices: np.ndarray
    X: np.ndarray
    stopped: np.ndarray


class StageSearch:
    """The search for the end of a stage."""

    def __init__(self, stage: StageJobs) -> None:
        self.stage = stage

    def solve(self, more: np.ndarray, *, known: StageEnd | None = None) -> StageEnd:
        """The end of the stage.

        ``more``: (k,) types known to limit; ``known``: the end as found when not all of them were known.

        Raises:
            MoreTypesError: the jobs do not fit where they are.
            SolverError: no end was found.
        """
        nothing, every = np.zeros_like(self.stage.rates), np.ones(len(self.stage.size), dtype=bool)
        X = self.stage.filled_up(~every, self.stage.end, nothing)
        if not self.stage.over(X).any():
            return self._without_limit(X)
        s, prices = (
            self._again(known, more) if known is not None and known.prices.any() else self._rough(more)
        )
        types, bound, proof, part = prices > 0, self.stage.end, None, FIRST_BOX
        for _ in range(TRIALS):
            program = self.stage.program(types, s)
            if not len(program.rows):
                if proof is not None and s >= bound * (1 - CLOSE) and (types == (proof > 0)).all():
                    # Full of jobs that do not rise: it limits no job of this stage.
                    X = self.stage.filled_up(types, s, nothing)
                    return self._end(s, bound, proof, X, program)
                types, prices, part = every, prices + _usual(prices, self.stage.size), WIDE
                program = self.stage.program(types, s)
            # Far from the end of the stage, only the prices of a trial count; any prove that jobs do not fit.
            at_start = s <= 0 and proof is None
            far = part > FAR and (at_start or 0 < s < self.stage.end) and len(program.rows) > MANY
            coarse = (AT_START if at_start else NEAR) if far else 0.0
            found = self._solved(program, prices[types], part=part, coarse=coarse)
            prices = np.zeros(len(self.stage.size))
            prices[types] = found.prices
            prices[(prices <= UNPRICED * prices.max()) & ~more] = 0.0
            root = max(self.stage.bound(prices, s), 0.0)
            if proof is None or root < bound:
                bound, proof = root, prices
            if s <= 0 and found.u > 1 + 10 * CLOSE:
                raise MoreTypesError(prices > 0)
            tolerance = JITTERED if s <= bound * (1 + CLOSE) else CLOSE
            if found.u <= 1 + tolerance and s >= bound * (1 - CLOSE) and not coarse:
                X = np.zeros_like(self.stage.rates)
                X[np.ix_(program.jobs, program.kept)] = found.X
                X = self.stage.filled_up(types, s, X)
                if found.u >= 1 - JITTERED and ((proof > 0) == types).all():
                    return self._end(s, bound, proof, X, program)
                if bound >= self.stage.end and not (self.stage.over(X) & ~types).any():
                    return self._without_limit(X)
                # The prices that prove the bound are those of other types, or some types are overfull.
                over = self.stage.over(X) & ~types if bound >= self.stage.end else proof > 0
                prices = np.where(over & (proof <= 0), _usual(proof, self.stage.size), proof)
                types, part = (types | over if bound >= self.stage.end else over), WIDE
                continue
            part = float(np.clip(3.0 * abs(bound - s) / s, NARROW, WIDE)) if s > 0 else WIDE
            types = (prices > 0) | (proof > 0) | more
            prices = np.where(prices > 0, prices, proof)
            prices = np.where(types & (prices <= 0), 1e-2 * _usual(prices, self.stage.size), prices)
            s = bound
        raise SolverError(f"a stage of water filling found no end; it was at {s} of {self.stage.end}")

    def _end(
        self, s: float, bound: float, prices: np.ndarray, X: np.ndarray, program: PricedJobs
    ) -> StageEnd:
        stopped = stopped_jobs(self.stage, program, prices, s, X)
        return StageEnd(s=s, bound=max(bound, s), prices=self.stage.per_gpu(prices, s), X=X, stopped=stopped)

    def _without_limit(self, X: np.ndarray) -> StageEnd:
        return StageEnd(
            s=self.stage.end,
            bound=self.stage.end,
            prices=np.zeros(len(self.stage.size)),
            X=X,
            stopped=np.ones(len(X), dtype=bool),
        )

    def _solved(
        self, program: PricedJobs, prices: np.ndarray, *, part: float, coarse: float = 0.0
    ) -> Utilization:
        found = None
        if len(program.rows):
            found = least_utilization(program.rows, prices, part=part, alike=self.stage.alike, coarse=coarse)
        if found is None:
            raise SolverError("a stage of water filling has no prices")
        return found

    def _again(self, known: StageEnd, more: np.ndarray) -> tuple[float, np.ndarray]:
        """(s, prices) to begin with where the stage has ended before without the types ``more``."""
        prices = known.prices / (known.prices @ self.stage.size)
        return known.s, np.where(more, np.maximum(prices, 1e-2 * _usual(prices, self.stage.size)), prices)

    def _rough(self, more: np.ndarray) -> tuple[float, np.ndarray]:
        """(s, prices) to a few parts in a hundred; types that seem not to limit have the price 0."""
        stage = self.stage.sampled(ROUGH_JOBS)
        every = np.ones(len(stage.size), dtype=bool)
        s, prices = adjusted_prices(stage.sampled(SAMPLE).program(every, stage.end))
        types = (prices * stage.size > LIMITING) | more
        prices = np.where(types, np.maximum(prices, 1e-2 * _usual(prices, stage.size)), 0.0)
        # Between s where GPUs are left (low) and are short (high), each with its u.
        low: tuple[float, float] | None = None
        high: tuple[float, float] | None = None
        bound, proof, part = stage.bound(prices, s), prices, 0.1
        s = min(s, bound)
        for _ in range(ROUGH_TRIALS):
            program = stage.program(types, s)
            if not len(program.rows):
                break
            found = self._solved(program, prices[types], part=part, coarse=FIRST_TRIALS)
            prices = np.zeros(len(stage.size))
            prices[types] = found.prices
            root = stage.bound(prices, s)
            if root < bound:
                bound, proof = root, prices
            if abs(bound - s) <= ROUGH * s or (found.u < 1 and s >= stage.end) or (found.u > 1 and s <= 0):
                break
            if found.u < 1:
                low = (s, found.u)
            else:
                high = (s, found.u)
            before, s = s, min(_next_trial(low, high, s, found.u, root), bound)
            part = float(np.clip(abs(s / before - 1), 0.02, WIDE)) if before > 0 else WIDE
        prices = np.where(proof > 0, proof, prices)
        worth = prices * stage.size
        return max(bound, 0.0), np.where((worth > LIMITING * worth.sum()) | more, prices, 0.0)


def _next_trial(
    low: tuple[float, float] | None, high: tuple[float, float] | None, s: float, u: float, root: float
) -> float:
    """The next s to try for u = 1: between the known points, or towards ``root``, which is a bound."""
    if low is not None and high is not None:
        (a, ua), (b, ub) = low, high
        between = a + (b - a) * (1 - ua) / (ub - ua)
        return min(max(between, a + 0.1 * (b - a)), b - 0.1 * (b - a), root)
    if low is not None and s > 0:
        return min(root, max(1.05 * s, s / max(u, 0.1), 0.5 * (s + min(root, 3 * s))))
    return root


def _usual(prices: np.ndarray, size: np.ndarray) -> float:
    """A mean price."""
    total = float(prices @ size)
    return (total if total > 0 else 1.0) / float(size.sum())


def adjusted_prices(demands: PricedJobs) -> tuple[float, np.ndarray]:
    """(s, prices): about how far the demands can go, and (k,) prices that prove it, worth 1 with all GPUs.

    Price adjustment: each job answers prices with its cheapest way to meet its demand (``best_response``).
    Prices then change by the logarithm of the demand for a type relative to the mean of all types, with a
    separate step length for each type: longer while it keeps its direction, half where it turns (as the step
    lengths of Rprop, Riedmiller and Braun 1993). At every step the demands go to the s that the prices allow
    at most, so prices never answer demands far from those that can be met. Any prices prove a bound; here
    they need not be exact.

    Args:
        demands: of some thousand jobs, whose ``rows`` count the GPUs of all that they stand for; ``lift`` is
            the number of GPUs of each type and -``capacity`` what others hold; every type has some.
    """
    rows = demands.rows
    size = rows.lift
    prices = 1.0 / size / len(size)
    best, best_prices = s, _ = demands.end, prices
    step, before = np.full(len(size), FIRST_STEP), np.zeros(len(size))
    for _ in range(ADJUSTMENTS):
        asked = dataclasses.replace(rows, base=demands.demand(s))
        at = respond(asked, prices, 0.0)
        s = demands.root(at.level, float(at.time.sum() + prices @ (size + rows.capacity)))
        if s < best:
            best, best_prices = s, prices
        part = (at.used(rows) - rows.capacity) / size
        mean = float(prices @ (part * size))
        pull = np.log(np.clip(part / mean, LEAST_PART, GREATEST_PART)) if mean > 0 else np.zeros(len(size))
        step = np.clip(np.where(pull * before > 0, LONGER * step, SHORTER * step), SHORTEST, LONGEST)
        before = pull
        prices = prices * np.exp(step * pull)
        prices = prices / (prices @ size)
    return best, best_prices


FULL = 1e-9
"""Relative room below which a job counts as full."""
SMALL = 1e-9
"""A gap is relative to a job's level, or to this part of its level at full speed where that is more: below
1e-15 of full speed, levels are rounding."""
OVER = 1e-8
"""Part of a type's GPUs that may be exceeded; the excess is scaled away at the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """Outcome of water filling.

    Attributes:
        answer: the shares; the gap is the largest of any stage.
        levels: (n,) levels without weights, as demanded in the end.
        stages: number of demand paths that were solved.
    """

    answer: Answer
    levels: np.ndarray
    stages: int


def largest_gap(instance: Instance, x: np.ndarray, bound: np.ndarray) -> float:
    """The largest part of a job's level that shares ``x`` miss of ``bound`` (n,), proven, without weights."""
    least = SMALL * instance.level_scale * instance.top
    size = np.where(bound > 0, np.maximum(bound, least), 1.0)
    reached = instance.level_scale * instance.throughput(x)
    return float(np.maximum((bound - reached) / size, 0.0).max(initial=0.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstStage:
    """End of the first stage, and (k,) how much further it would go with one GPU more of each type."""

    s: float
    prices: np.ndarray

    def shadow_prices(self, root: Team, full: np.ndarray, levels: np.ndarray) -> np.ndarray | None:
        """(k,) increase of the least volume per weight of the root's members per GPU; None: not known.

        ``full``, ``levels``: (n,) levels at full speed, and in the end. A member that was full before the
        end of the stage rises no more; if all rise after it, the stages that follow limit them.
        """
        least = root.least(levels, full > 0)
        if least > self.s * (1 + CERTIFIED_GAP):
            return None
        return self.prices if least >= self.s * (1 - CERTIFIED_GAP) else np.zeros_like(self.prices)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """State between two stages.

    Attributes:
        levels, bound: (n,) so far.
        settled: (n,) jobs whose shares X are final.
        open_types: (k,) types that do not limit.
        reserved: (k,) GPUs of settled jobs.
        first: the first stage; None before it.
    """

    levels: np.ndarray
    bound: np.ndarray
    settled: np.ndarray
    X: np.ndarray
    open_types: np.ndarray
    reserved: np.ndarray
    first: FirstStage | None = None


class _Filling:
    """The instance and its arrays, which are the same in all stages."""

    def __init__(self, instance: Instance, root: Team) -> None:
        self.instance, self.root = instance, root
        self.full = np.where(instance.runnable, instance.level_scale, 0.0) * instance.top
        self.columns = stage_columns(instance)
        self.alike = self.columns.alike()

    def start(self) -> _State:
        n, k = len(self.full), len(self.instance.capacity)
        return _State(
            levels=np.zeros(n),
            bound=np.zeros(n),
            settled=self.full <= 0,
            X=np.zeros(self.columns.rates.shape),
            open_types=self.instance.capacity > 0,
            reserved=np.zeros(k),
        )

    def stage(
        self, state: _State, more: np.ndarray, known: StageEnd | None
    ) -> tuple[_State, np.ndarray, StageEnd]:
        """(state after the next stage, (k,) types that limited it, its end).

        ``more``, ``known``: types known to limit (k,), and the end as found when not all were.

        Raises:
            MoreTypesError: types that had the price 0 limit, too.
            SolverError: no end was found.
        """
        reach = self._reach(state.open_types)
        left = np.where(state.settled, 0.0, np.maximum(reach * self.full - state.levels, 0.0))
        left[left <= FULL * self.full] = 0.0
        fill = FillStage(self.root, state.levels, left)
        jobs, kinds = np.flatnonzero(~state.settled), np.flatnonzero(state.open_types)
        # A job that no open type serves has level 0 and is settled, so every job here has a rate.
        stage = StageJobs(
            fill,
            jobs=jobs,
            columns=self.columns.restricted(jobs, kinds),
            full=self.full[jobs],
            size=self.instance.capacity[kinds],
            reserved=state.reserved[kinds],
            alike=self.alike,
        )
        limits = np.zeros(len(state.reserved), dtype=bool)
        try:
            end = StageSearch(stage).solve(more[kinds], known=known)
        except MoreTypesError as error:
            limits[kinds] = error.types
            raise MoreTypesError(limits) from error
        limits[kinds] = end.prices > 0
        return self._after(state, fill, jobs, kinds, end, limits), limits, end

    def _after(
        self,
        state: _State,
        fill: FillStage,
        jobs: np.ndarray,
        kinds: np.ndarray,
        end: StageEnd,
        limits: np.ndarray,
    ) -> _State:
        mine = jobs[end.stopped]
        every, settled, bound = state.X.copy(), state.settled.copy(), state.bound.copy()
        if self.columns.use is None:
            every[np.ix_(mine, kinds)] = end.X[end.stopped]
        else:
            every[mine] = end.X[end.stopped]
        settled[mine] = True
        now = np.zeros_like(every)
        now[mine] = every[mine]
        bound[mine] = fill.levels(end.bound, mine)
        prices = np.zeros(len(state.reserved))
        prices[kinds] = end.prices
        return _State(
            levels=fill.levels(end.s),
            bound=bound,
            settled=settled,
            X=every,
            open_types=state.open_types & ~limits,
            reserved=state.reserved + self.columns.used(now),
            first=state.first or FirstStage(s=end.s, prices=prices),
        )

    def filled(self, state: _State, stages: int) -> Filled:
        """Allocation of the last state, with the gap between the levels and their proven upper bounds."""
        instance, columns, first = self.instance, self.instance.columns, state.first
        x = instance.feasible(state.X[columns.first, columns.place])
        answer = Answer(
            x=x,
            solver=f"prices and {SOLVER}",
            gap=largest_gap(instance, x, state.bound),
            shadow_prices=None if first is None else first.shadow_prices(self.root, self.full, state.levels),
        )
        return Filled(answer=answer, levels=state.levels, stages=stages)

    def _reach(self, types: np.ndarray) -> np.ndarray:
        """(n,) the fastest rate on ``types``."""
        if self.columns.use is not None:
            return np.asarray(np.where(self.columns.on(~types), 0.0, self.columns.rates).max(axis=1))
        return np.asarray(self.columns.rates[:, types].max(axis=1, initial=0.0))


def fill_by_prices(instance: Instance, root: Team) -> Filled:
    """Fill until every job is bottlenecked or at full speed; no pairs.

    Raises:
        SolverError: a stage found no end, or several, and the next depends on which.
    """
    filling = _Filling(instance, root)
    state, k = filling.start(), len(instance.capacity)
    before: list[tuple[_State, np.ndarray, StageEnd]] = []
    more, known = np.zeros(k, dtype=bool), None
    for _ in range(3 * k + 3):
        if state.settled.all():
            return filling.filled(state, len(before))
        try:
            after, limits, end = filling.stage(state, more, known)
        except MoreTypesError as error:
            if not before:
                break
            # The stage before ended too late: these types limit it, too.
            state, more, known = before.pop()
            more = more | error.types
            continue
        over = after.open_types & (after.reserved > instance.capacity * (1 + OVER))
        if over.any():
            # Jobs that stopped do not fit on the rest.
            more, known = more | limits | over, end
            continue
        before.append((state, limits, end))
        state, more, known = after, np.zeros(k, dtype=bool), None
    raise SolverError("water filling by prices found no end")
