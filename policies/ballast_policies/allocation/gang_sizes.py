"""A job at any number of GPUs, of one type or several: all its configurations by two numbers a type and size.

    throughput(n_1 .. n_k) = speedup(N) / N * sum_j throughput_j n_j        N = n_1 + ... + n_k GPUs

``throughput_j`` are steps/s on one GPU of type j, and the work of a gang of several types is divided by their
speeds.  ``speedup`` is as measured, or that of a pipeline of N equal stages with m microbatches, whose bubble
leaves N m / (m + N - 1) (GPipe, Huang et al., NeurIPS 2019, section 2.3).  The best of all configurations at
given prices is found without listing them: for each N the GPUs that gain most are taken first, which is exact
because their gains add up.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ballast_policies.allocation.problem import Configuration, ProblemError
from ballast_policies.contract.errors import ContractError, Problem

MOST_SIZES = 10_000
"""Numbers of GPUs that a job may have to choose from."""
MOST_LISTED = 1_000
"""Configurations of a job that are listed for policies that cannot ask for the best one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GangSizes:
    """A source of configurations for :func:`~ballast_policies.allocation.generated.allocate_generated`.

    Attributes:
        throughput: GPU type -> steps/s on one GPU; missing or 0: the job cannot run there.
        microbatches: of a step, at least 1: the job is a pipeline with a stage on each GPU.
        speedup: number of GPUs, as text -> steps/s on that many GPUs over those on one of them, in place of
            ``microbatches``; the job runs at these numbers of GPUs only, and on one.
        sizes: numbers of GPUs that the job may have; None: all.
        mixed: whether a gang may have GPUs of several types.

    Raises:
        ContractError: a value is impossible.
    """

    throughput: Mapping[str, float]
    microbatches: int | None = None
    speedup: Mapping[str, float] | None = None
    sizes: tuple[int, ...] | None = None
    mixed: bool = True

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ContractError(problems)

    def _problems(self) -> Iterator[Problem]:
        if not self.throughput:
            yield Problem("throughput", "there is no GPU type. To fix: give steps/s on one GPU of each type")
        for gpu_type, rate in self.throughput.items():
            if not rate >= 0:
                yield Problem(f"throughput.{gpu_type}", f"{rate:g} is not at least 0")
        if (self.microbatches is None) == (self.speedup is None):
            both = "both are given" if self.speedup is not None else "neither is given"
            yield Problem("microbatches", f"of microbatches and speedup {both}. To fix: give one of them")
        if self.microbatches is not None and self.microbatches < 1:
            yield Problem("microbatches", f"{self.microbatches} is not at least 1")
        for text, times in (self.speedup or {}).items():
            if not _is_number_of_gpus(text):
                yield Problem(f"speedup.{text}", f"'{text}' is not a number of GPUs, such as '4'")
            elif not times > 0:
                yield Problem(f"speedup.{text}", f"{times:g} is not above 0")
            elif int(text) == 1 and times != 1:
                yield Problem("speedup.1", f"{times:g} is not 1, the speed of one GPU. To fix: leave it out")
        if self.sizes is not None:
            if not self.sizes:
                yield Problem("sizes", "there is none. To fix: give at least one, or leave it out")
            if len(self.sizes) > MOST_SIZES:
                yield Problem("sizes", f"{len(self.sizes)} are more than {MOST_SIZES:,}")
            for place, size in enumerate(self.sizes):
                if size < 1:
                    yield Problem(f"sizes[{place}]", f"{size} is not at least 1")
                elif self.speedup is not None and size > 1 and str(size) not in self.speedup:
                    yield Problem(f"sizes[{place}]", f"speedup does not have {size} GPUs. To fix: add it")

    def best_answer(
        self, prices: Mapping[str, float], worth: float, most: Mapping[str, int]
    ) -> Configuration | None:
        """Best answer, as of :class:`~ballast_policies.allocation.generated.ConfigurationSource`."""
        types = [t for t, gpus in most.items() if gpus > 0 and self.throughput.get(t, 0.0) > 0]
        if not types:
            return None
        there = np.array([most[t] for t in types])
        sizes, part = self._speeds(int(there.sum()) if self.mixed else int(there.max()))
        if not len(sizes):
            return None
        rate = np.array([self.throughput[t] for t in types])
        gains = worth * np.outer(part, rate) - np.array([prices[t] for t in types])  # of one GPU each
        if self.mixed:
            order = np.argsort(-gains, axis=1, kind="stable")
            before = np.cumsum(there[order], axis=1) - there[order]
            taken = np.zeros_like(order)
            np.put_along_axis(taken, order, np.clip(sizes[:, None] - before, 0, there[order]), axis=1)
            best = int(np.argmax((gains * taken).sum(axis=1)))
            gpus = taken[best]
        else:
            of_all = np.where(sizes[:, None] <= there, gains * sizes[:, None], -np.inf)
            best, of_type = divmod(int(np.argmax(of_all)), len(types))
            gpus = np.where(np.arange(len(types)) == of_type, sizes[best], 0)
        return self._configuration(types, gpus.tolist(), float(part[best]))

    def listed(self, most: Mapping[str, int]) -> tuple[Configuration, ...] | None:
        """All configurations on clusters with ``most`` GPUs of each type; None: more than MOST_LISTED."""
        types = [t for t, gpus in most.items() if gpus > 0 and self.throughput.get(t, 0.0) > 0]
        there = [most[t] for t in types]
        largest = (sum if self.mixed else max)(there) if there else 0
        if self.too_many_sizes(largest) is not None:
            return None
        found = []
        for size, part in zip(*(each.tolist() for each in self._speeds(largest)), strict=True):
            for gpus in _of_all(there, size) if self.mixed else _of_one(there, size):
                found.append(self._configuration(types, gpus, part))
                if len(found) > MOST_LISTED:
                    return None
        return tuple(found)

    def _configuration(self, types: Sequence[str], gpus: Sequence[int], part: float) -> Configuration:
        """Configuration of that many GPUs of each of the ``types``; ``part``: speedup over size."""
        chosen = {t: n for t, n in zip(types, gpus, strict=True) if n}
        return Configuration(
            name=" + ".join(f"{n} x {t}" for t, n in chosen.items()),
            gpus=chosen,
            throughput=part * sum(self.throughput[t] * n for t, n in chosen.items()),
        )

    def too_many_sizes(self, largest: int) -> str | None:
        """Reason that a gang of up to ``largest`` GPUs has too many sizes for the job's policy, or None."""
        if self.sizes is None and self.speedup is None and largest > MOST_SIZES:
            return f"all numbers of GPUs up to {largest:,} are more than {MOST_SIZES:,}. To fix: list some"
        return None

    def _speeds(self, largest: int) -> tuple[np.ndarray, np.ndarray]:
        """(sizes up to ``largest``, speedup over size of each).

        Raises:
            ProblemError: there are too many of them.
        """
        reason = self.too_many_sizes(largest)
        if reason is not None:
            raise ProblemError(f"sizes: {reason}")
        times = {} if self.speedup is None else {1: 1.0, **{int(n): x for n, x in self.speedup.items()}}
        if self.sizes is not None:
            sizes = np.unique(self.sizes)
        elif times:
            sizes = np.array(sorted(times))
        else:
            sizes = np.arange(1, largest + 1)
        sizes = sizes[sizes <= largest]
        if times:
            return sizes, np.array([times[n] / n for n in sizes.tolist()])
        microbatches = float(self.microbatches or 1)
        return sizes, microbatches / (microbatches + sizes - 1.0)


def _of_all(there: Sequence[int], size: int) -> Iterator[list[int]]:
    """All ways to take ``size`` GPUs of types that have ``there`` together as many."""
    if not there:
        yield []
        return
    for some in range(max(0, size - sum(there[1:])), min(there[0], size) + 1):
        for others in _of_all(there[1:], size - some):
            yield [some, *others]


def _of_one(there: Sequence[int], size: int) -> Iterator[list[int]]:
    """All ways to take ``size`` GPUs of one type."""
    for place, most in enumerate(there):
        if size <= most:
            yield [size if i == place else 0 for i in range(len(there))]


def _is_number_of_gpus(text: str) -> bool:
    return text.isascii() and text.isdigit() and not text.startswith("0") and len(text) < 10
