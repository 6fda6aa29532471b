"""The table of balancers: every name that ``rebalance.balancer`` takes."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import loads_on_ranks
from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.balancers.several_stages import StagedPipeline
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.partition import CutStep, Partition, PlanningError, best_cuts, check_counts
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_policies.registry import Registry


def deepspeed_partition(seconds: Sequence[float], ranks: int) -> Partition:
    """The partition that DeepSpeed's rule makes of these loads.

    Raises:
        PlanningError: fewer layers than ranks.
    """
    layers = len(seconds)
    check_counts(layers, ranks)
    smallest = np.full((ranks + 1, layers + 1), np.inf)

    def least_spread(step: CutStep) -> tuple[np.ndarray, np.ndarray]:
        high = np.maximum(step.before, step.loads)
        low = np.minimum(smallest[step.rank, step.first], step.loads)
        spread = np.subtract(high, low, out=np.full_like(high, np.inf), where=np.isfinite(high))
        # Of equal spreads DeepSpeed takes the last cut.
        chosen = len(step.first) - 1 - spread[:, ::-1].argmin(axis=1)
        smallest[step.rank + 1, step.ends] = low[np.arange(len(chosen)), chosen]
        return high, chosen

    return best_cuts(ranks, layers, loads_on_ranks(seconds, ranks), least_spread)[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BalancerInput:
    """The input of a balancer.

    Attributes:
        partition: the one in force.
        seconds: that each layer is expected to take per step, shape (L,).
        microbatches: per step.
        capacity: speed and memory of the ranks, and bytes of the layers.
        balanced: what is balanced in place of the seconds, e.g. each layer's parameters.
        link_seconds: transfer of one microbatch over each link, shape (p - 1,); None: not measured.
        staged: where ranks hold several stages, their schedule; then p is the number of stages.
    """

    partition: Partition
    seconds: Sequence[float]
    microbatches: int
    capacity: RankCapacity = UNLIMITED
    balanced: Sequence[float] | None = None
    link_seconds: Sequence[float] | None = None
    staged: StagedPipeline | None = None

    @property
    def weights(self) -> Sequence[float]:
        """Balanced quantity by layer, shape (L,)."""
        return self.seconds if self.balanced is None else self.balanced

    def step_seconds(self, partition: Partition, *, over_links: bool = False) -> float:
        """Predicted seconds per step under a partition; ``over_links``: with the transfers over them."""
        if self.staged is not None:
            return self.staged.step_seconds(partition)
        loads, links = partition.loads(self.seconds, self.capacity.speeds), self.link_seconds
        if not (over_links and links):
            return predict_step_seconds(loads, self.microbatches)
        # The steady period takes the place of the largest load; filling passes each link twice.
        period = steady_period_seconds(loads / self.microbatches, links)
        return (self.microbatches - 1) * period + float(loads.sum()) / self.microbatches + 2 * sum(links)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balancer:
    """The properties of a balancer; operator, trainer and documentation read it here.

    Attributes:
        summary: one sentence for the documentation.
        choose: gives the partition to compare with the one in force; raises PlanningError where the input
            does not suit it, or nothing fits the memory.
        measures_links: it needs ``link_seconds``, and a step's prediction includes the transfers.
        balances_parameters: it can balance parameters in place of seconds (``rebalance.by``).
        limits_memory: it looks for partitions within ``rebalance.memoryBytes``.
        schedules: those that its prediction holds for; None: all.
        replicas: it can divide layers over stages that several ranks hold.
    """

    summary: str
    choose: Callable[[BalancerInput], Partition]
    measures_links: bool = False
    balances_parameters: bool = True
    limits_memory: bool = True
    schedules: frozenset[str] | None = None
    replicas: bool = True


def _exact(given: BalancerInput) -> Partition:
    if given.staged is not None:
        return given.staged.balanced(given.partition, given.balanced)
    return nearest_partition(given.partition, given.weights, given.capacity, microbatches=given.microbatches)


def _diffusion(given: BalancerInput) -> Partition:
    passed = diffuse(given.partition, given.weights, given.capacity)
    return passed[-1] if passed else given.partition


def _network(given: BalancerInput) -> Partition:
    partition, links = given.partition, given.link_seconds
    if links is None or len(links) != partition.ranks - 1:
        raise PlanningError(f"method network needs link_seconds for {partition.ranks - 1} links, got {links}")
    found = network_aware_partition(
        [weight / given.microbatches for weight in given.weights],
        partition.ranks,
        boundary_seconds=[1.0] * (partition.layers - 1),
        link_factors=links,
        speeds=given.capacity.speeds,
    )
    # Where the shortest period does not fit the memory: the best partition that does, without the links.
    return found if given.capacity.fits(found) else _exact(given)


def _deepspeed(given: BalancerInput) -> Partition:
    capacity, speeds = given.capacity, given.capacity.speeds
    if speeds is not None and min(speeds) != max(speeds):
        raise PlanningError(f"deepspeed ignores speeds, got {list(speeds)}. To fix: method exact")
    found = deepspeed_partition(given.weights, given.partition.ranks)
    if not capacity.fits(found):
        raise PlanningError(
            f"deepspeed ignores memory: its partition {found.bounds} needs "
            f"{capacity.bytes_taken(found).tolist()} bytes of {capacity.memory}. To fix: method exact"
        )
    return found


BALANCERS = Registry(
    "balancer",
    group="ballast.balancers",
    row_type=Balancer,
    rows={
        "exact": Balancer(
            summary="The best partition, by dynamic programming, over heterogeneous ranks by the predicted "
            "step; of several, the one that moves the fewest bytes. Where ranks hold several stages: the "
            "shortest step of the schedule, by local search.",
            choose=_exact,
        ),
        "diffusion": Balancer(
            summary="Chain moves from the partition in force, while the load gets more even.",
            choose=_diffusion,
        ),
        "network": Balancer(
            summary="The best partition over links whose transfers are measured, with 1F1B.",
            choose=_network,
            measures_links=True,
            balances_parameters=False,
            schedules=frozenset({"1F1B"}),
            replicas=False,
        ),
        "deepspeed": Balancer(
            summary="DeepSpeed's rule, for reference.",
            choose=_deepspeed,
            limits_memory=False,
            replicas=False,
        ),
    },
)
"""Every name that ``rebalance.balancer`` takes."""

DEFAULT_BALANCER = next(iter(BALANCERS.builtin))
"""The balancer of a job that names none."""
