"""The table of planners: every name that ``ballast plan --planner`` takes."""

import dataclasses
from collections.abc import Callable

from ballast_policies.planning.planners import published, rows
from ballast_policies.planning.planners.answers import PlannerAnswer
from ballast_policies.planning.planners.request import PlanRequest
from ballast_policies.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Everything that is known about a planner; the command line and the documentation read it here.

    Attributes:
        summary: what it plans, for the documentation.
        plan: raises PlanningError or ScheduleError where there is no plan.
        needs_links: it cannot plan without the cluster's bandwidth; without it transfers are free.
        simulates: its answer has a simulated pipeline, which can be drawn and exported.
        measured: it plans from layers that were measured by GPU type and tensor degree.
    """

    summary: str
    plan: Callable[[PlanRequest], PlannerAnswer]
    needs_links: bool = False
    simulates: bool = False
    measured: bool = False


PLANNERS = Registry(
    "planner",
    group="ballast.planners",
    row_type=Planner,
    rows={
        "pipeline": Planner(summary="one rank a GPU", plan=rows.pipeline, simulates=True),
        "best": Planner(
            summary="all degrees, microbatches, recomputation, layers and order of GPUs, with a bound",
            plan=rows.best,
            measured=True,
        ),
        "pipedream": Planner(summary="replicated stages", plan=published.pipedream),
        "2bw": Planner(
            summary="parallel pipelines with two weight versions", plan=published.two_versions, measured=True
        ),
        "megatron": Planner(
            summary="PTD-P: tensor x data x pipeline of equal stages", plan=published.megatron, measured=True
        ),
        "amp": Planner(summary="tensor x data x pipeline on unlike GPUs and links", plan=published.amp),
    },
)

DEFAULT_PLANNER = next(iter(PLANNERS.builtin))
"""The planner where none is named."""

__all__ = ["DEFAULT_PLANNER", "PLANNERS", "PlanRequest", "Planner", "PlannerAnswer"]
