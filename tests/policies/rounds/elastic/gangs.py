"""Elastic gangs with diminishing returns, and a round of them on nodes of one type."""

from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.values import RoundSettings

from tests.policies.rounds.played import one_round

CONCAVE = {1: 1.0, 2: 1.78, 3: 2.4, 4: 2.9, 5: 3.3, 6: 3.7, 7: 4.0, 8: 4.3}


def gang(sizes=range(1, 9), *, speeds=CONCAVE, types=("v100",), **options):
    return ElasticGang(speeds={t: {size: speeds[size] for size in sizes} for t in types}, **options)


def decide(
    jobs,
    nodes,
    elastic,
    *,
    running=None,
    surplus=Surplus.LEVEL,
    within_round=False,
    most_moves=None,
    min_run_seconds=0.0,
    **options,
):
    return one_round(
        nodes,
        jobs,
        now=100.0,
        shares={one.name: {"v100": 1.0} for one in jobs},
        running=running,
        settings=RoundSettings(
            round_seconds=60.0,
            within_round=within_round,
            max_moves_per_hour=most_moves,
            min_run_seconds=min_run_seconds,
        ),
        elastic=elastic,
        surplus=surplus,
        **options,
    )


def sizes_of(decided):
    return {name: len(placement.nodes) for name, placement in decided.placements.items()}
