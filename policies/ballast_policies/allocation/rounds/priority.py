"""Who is next: the allocation's share against the time received (dissertation section 5.5.1).

priority[m, j] = X[m, j] / f[m, j], with f the fraction of job m's own time that it spent on type j.
A pair (m, j) without any share has priority 0: it runs only where GPUs would idle (work conservation).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.rounds.values import Gang

SHARE_EPSILON = 1e-6
"""A smaller fraction is a solver's rounding, not a wish."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Job ``job`` on GPU type ``gpu_type``: its share, what it has had of it, and its priority."""

    job: str
    gpu_type: str
    share: float
    received_fraction: float
    priority: float


def ordered_claims(
    allocation: Allocation,
    gangs: Sequence[Gang],
    received: Mapping[str, Mapping[str, float]],
    *,
    now_received_seconds: float,
) -> list[Claim]:
    """All claims that can run, the most urgent first; ties by share, then steps/s, then names.

    Args:
        allocation: the shares X.
        gangs: who wants to run.
        received: job -> GPU type -> seconds run.
        now_received_seconds: seconds that a job could have had: the denominator of f for all alike.
    """
    claims = []
    for gang in gangs:
        for gpu_type, rate in gang.throughput.items():
            if rate <= 0:
                continue
            share = allocation.allocation.get(gang.job, {}).get(gpu_type, 0.0)
            had = received.get(gang.job, {}).get(gpu_type, 0.0) / max(now_received_seconds, 1e-9)
            # One part in a thousand keeps a job that has had nothing finite, and the order by share.
            priority = share / max(had, 1e-3) if share > SHARE_EPSILON else 0.0
            claims.append(
                (
                    -priority,
                    -share,
                    -rate,
                    gang.job,
                    gpu_type,
                    Claim(
                        job=gang.job,
                        gpu_type=gpu_type,
                        share=share,
                        received_fraction=had,
                        priority=priority,
                    ),
                )
            )
    return [entry[-1] for entry in sorted(claims, key=lambda entry: entry[:-1])]
