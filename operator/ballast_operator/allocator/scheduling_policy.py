"""A ClusterPolicy's spec as decisions read it."""

from ballast_policies.allocation.problem import Entity
from ballast_policies.scheduling import SchedulingPolicy

from ballast_operator.api.cluster_policy import ClusterPolicy, Objective


def scheduling_policy(policy: ClusterPolicy) -> SchedulingPolicy:
    """By what ``policy`` lets decide."""
    spec, objective = policy.spec, policy.spec.objective
    return SchedulingPolicy(
        objective=objective.policy,
        heterogeneity_agnostic=objective.heterogeneity_agnostic,
        teams=teams(objective),
        round_seconds=float(spec.round_seconds),
        min_run_seconds=spec.moves.min_run_seconds,
        max_moves_per_hour=spec.moves.max_moves_per_hour,
        dry_run=spec.dry_run,
        name=policy.metadata.name,
        version=policy.metadata.generation,
    )


def teams(objective: Objective) -> dict[str, Entity]:
    """Team -> how it stands to the others."""
    return {
        name: Entity(weight=team.weight, policy=team.policy, parent=team.parent)
        for name, team in objective.entities.items()
    }
