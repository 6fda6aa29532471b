"""Price classes: one column of the allocation for each price of a GPU type, instead of one per type.

Policies that read prices choose between the pools of a GPU type, e.g. on-demand and spot. Where some pools
are closed to some jobs, every policy tells them apart, too. Jobs are as fast on
either, so speeds, levels and equal shares do not change; only a gang that exceeds the GPUs at one price
cannot use that price. Classes of equal price are one column.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ballast_policies.allocation.problem import Allocation, Configuration, Job, Problem

IN_COLUMNS, AND = " in ", " and "
"""Words between a configuration's name and the columns of its GPUs, and between two columns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedPool:
    """A pool.

    Attributes:
        gpu_type: of its GPUs.
        price: of one for an hour; 0: not known.
        gpus: that may be handed out.
        group: equal for pools that are open to the same jobs.
        region: where it is, if it matters; empty: it does not.
    """

    pool: str
    gpu_type: str
    price: float
    gpus: int
    group: tuple[int, ...] = ()
    region: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriceClasses:
    """The columns of an allocation.

    Attributes:
        of_pool: pool -> column.
        gpu_type: column -> GPU type.
        gpus, price: column -> GPUs, and price of a GPU hour.
    """

    of_pool: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpu_type: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    price: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, pools: Sequence[PricedPool], prices: Mapping[str, float]) -> "PriceClasses":
        """The columns of ``pools``; ``prices``: GPU type -> price of pools whose own price is not known.

        A type whose pools have one price and region, and are open to the same jobs, is one column, with its
        own name.
        """
        known = {pool.pool: pool.price or prices.get(pool.gpu_type, 0.0) for pool in pools}
        levels: dict[str, set[tuple[float, tuple[int, ...], str]]] = {}
        for pool in pools:
            levels.setdefault(pool.gpu_type, set()).add((known[pool.pool], pool.group, pool.region))
        of_pool, gpu_type, price = {}, {}, {}
        gpus: dict[str, int] = {}
        for pool in pools:
            cost = known[pool.pool]
            split = len(levels[pool.gpu_type]) > 1
            column = f"{pool.gpu_type} at {cost!r}" if split else pool.gpu_type
            if split and any(pool.region != region for _, _, region in levels[pool.gpu_type]):
                column += f" of {pool.region or 'no region'}"
            if split and any(pool.group != group for _, group, _ in levels[pool.gpu_type]):
                column += f" closed to {','.join(map(str, pool.group)) or 'none'}"
            of_pool[pool.pool], gpu_type[column], price[column] = column, pool.gpu_type, cost
            gpus[column] = gpus.get(column, 0) + pool.gpus
        return cls(of_pool=of_pool, gpu_type=gpu_type, gpus=gpus, price=price)

    @property
    def split_columns(self) -> dict[str, str]:
        """Column -> GPU type, of the types that have several columns."""
        return {column: kind for column, kind in self.gpu_type.items() if column != kind}

    def columns_of(self, gpu_type: str) -> tuple[str, ...]:
        """The columns of a GPU type, the cheapest first."""
        found = (column for column, kind in self.gpu_type.items() if kind == gpu_type)
        return tuple(sorted(found, key=lambda column: (self.price[column], column)))

    def split(
        self,
        problem: Problem,
        closed: Mapping[str, frozenset[str]] | None = None,
        usd_per_step: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Problem:
        """``problem`` with these columns in place of its GPU types.

        Args:
            problem: by GPU types.
            closed: job -> pools closed to it.
            usd_per_step: job -> pool -> what a step there costs besides the GPUs.
        """
        found = self._split(problem, closed) if self.split_columns else problem
        if not usd_per_step:
            return found
        jobs = (self._with_costs(job, usd_per_step.get(job.name, {})) for job in found.jobs)
        return dataclasses.replace(found, jobs=tuple(jobs))

    def _split(self, problem: Problem, closed: Mapping[str, frozenset[str]] | None) -> Problem:
        columns = {gpu_type: self.columns_of(gpu_type) or (gpu_type,) for gpu_type in problem.gpu_types}
        order = tuple(column for gpu_type in problem.gpu_types for column in columns[gpu_type])
        own = {column for names in columns.values() if len(names) > 1 for column in names}

        def of_job(job: Job) -> Job:
            barred = (closed or {}).get(job.name)
            usable = columns if not barred else self._open_columns(columns, barred)
            if job.configurations:
                found = [one for each in job.configurations for one in _in_columns(each, usable)]
                return dataclasses.replace(job, configurations=tuple(found))
            rates = {c: rate for t, rate in job.throughput.items() for c in usable.get(t, (t,))}
            return dataclasses.replace(job, throughput=rates)

        return dataclasses.replace(
            problem,
            gpu_types=order,
            capacity={c: self.gpus[c] if c in own else problem.capacity.get(c, 0) for c in order},
            prices={c: self.price[c] for c in own}
            | {c: problem.prices[c] for c in order if c not in own and c in problem.prices},
            jobs=tuple(of_job(job) for job in problem.jobs),
        )

    def _with_costs(self, job: Job, of_pools: Mapping[str, float]) -> Job:
        """The job with what its steps cost; of a configuration each GPU reads its part of the data."""
        of = {self.of_pool[pool]: usd for pool, usd in of_pools.items() if pool in self.of_pool}
        if not any(of.values()):
            return job
        if not job.configurations:
            return dataclasses.replace(job, usd_per_step=of)
        found = []
        for each in job.configurations:
            usd = sum(of.get(column, 0.0) * count for column, count in each.gpus.items()) / each.total
            found.append(dataclasses.replace(each, usd_per_step=usd))
        return dataclasses.replace(job, configurations=tuple(found))

    def _open_columns(
        self, columns: Mapping[str, tuple[str, ...]], barred: frozenset[str]
    ) -> dict[str, tuple[str, ...]]:
        """GPU type -> its columns that have a pool outside of ``barred``; of a type without any, all."""
        usable = {column for pool, column in self.of_pool.items() if pool not in barred}
        return {t: tuple(c for c in names if c in usable) or names for t, names in columns.items()}

    def merge(self, allocation: Allocation) -> Allocation:
        """``allocation`` over these columns by GPU type: shares summed, the largest shadow price.

        Shares of a configuration in several columns are summed as well.
        """
        if not self.split_columns:
            return allocation
        shadow: dict[str, float] = {}
        for column, value in allocation.shadow_prices.items():
            kind = self.gpu_type.get(column, column)
            shadow[kind] = max(value, shadow.get(kind, value))
        return dataclasses.replace(
            allocation,
            allocation={job: self._summed(row) for job, row in allocation.allocation.items()},
            pair_allocation={pair: self._summed(row) for pair, row in allocation.pair_allocation.items()},
            shadow_prices=shadow,
        )

    def _summed(self, row: Mapping[str, float]) -> dict[str, float]:
        return by_type(((self._whole(name), share) for name, share in row.items()), self.gpu_type)

    def _whole(self, name: str) -> str:
        """The name of a configuration, without the columns that its GPUs are of."""
        whole, found, columns = name.rpartition(IN_COLUMNS)
        split = found and not self.split_columns.keys().isdisjoint(columns.split(AND))
        return whole if split else name


def _in_columns(
    configuration: Configuration, columns: Mapping[str, tuple[str, ...]]
) -> Iterator[Configuration]:
    """The configuration on each combination of its types' columns; each type's GPUs are of one column."""
    types = [gpu_type for gpu_type, count in configuration.gpus.items() if count]
    choices = list(itertools.product(*(columns.get(gpu_type, (gpu_type,)) for gpu_type in types)))
    for choice in choices:
        gpus = {column: configuration.gpus[t] for t, column in zip(types, choice, strict=True)}
        suffix = f"{IN_COLUMNS}{AND.join(choice)}" if len(choices) > 1 else ""
        yield dataclasses.replace(configuration, name=configuration.name + suffix, gpus=gpus)


def by_type(values: Iterable[tuple[str, float]], gpu_type: Mapping[str, str]) -> dict[str, float]:
    """GPU type -> sum over its columns; ``gpu_type``: column -> GPU type."""
    found: dict[str, float] = {}
    for column, value in values:
        kind = gpu_type.get(column, column)
        found[kind] = found.get(kind, 0.0) + value
    return found
