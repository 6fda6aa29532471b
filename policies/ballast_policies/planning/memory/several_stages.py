"""Memory of pipelines whose ranks have several stages each: cuts are judged by the forecast."""

from collections.abc import Callable

from ballast_policies.planning.balancers.by_simulation import refine
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import schedule_of
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.partition import Partition, even_partition

MOST_PLAYED = 200_000
"""Actions that are played in search of a cut."""


def bytes_of_cuts(
    layers: MeasuredLayers, form: PipelineForm
) -> Callable[[Partition], tuple[float, ...]] | None:
    """Bytes of each rank by cut, as forecast; None: ranks have one stage, or the schedule is not known."""
    if form.positions == 1 or any(count != 1 for count in form.replicas):
        return None
    found = schedule_of(form)
    if found is None or found[0].stages <= found[0].ranks or found[0].stages > len(layers.held_bytes):
        return None
    schedule, facts = found
    rows = layers.rows(form.optimizer)

    def taken(cut: Partition) -> tuple[float, ...]:
        sizes = rank_bytes(
            cut, schedule, facts, rows, averaged=form.averaged, gradient_shares=form.gradient_shares
        )
        return tuple(each.total for each in sizes)

    return taken


def smallest_cut(
    layers: MeasuredLayers, form: PipelineForm, fullness: Callable[[Partition], float]
) -> Partition:
    """A cut of little ``fullness``: the even one or that of the smallest largest stage, improved.

    Its pipeline has several stages a rank, and as many layers at least.
    """
    found = schedule_of(form)
    assert found is not None
    schedule, facts = found
    kept = max(facts.stage_in_flight)
    sizes = [row.held_bytes + kept * row.activation_bytes for row in layers.rows(form.optimizer)]
    starts = [even_partition(len(sizes), schedule.stages), exact_partition(sizes, schedule.stages)]
    actions = sum(len(row) for row in schedule.actions)
    return refine(min(starts, key=fullness), fullness, most_evaluations=max(2, MOST_PLAYED // actions))
