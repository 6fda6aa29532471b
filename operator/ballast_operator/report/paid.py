"""What jobs that are deleted by now have paid in a pool, from its bill and the jobs that exist."""

from typing import Any

from ballast_policies.accounting import cost

ROUNDING = 1e-6
"""Of sums of prices."""


def paid_by_others(entry: dict[str, Any], jobs: float, seconds: float) -> float:
    """What others than the jobs that exist have paid of a pool's bill.

    As it was written, unless the jobs and this are less than they were together: then a job was deleted
    since, and the GPUs that jobs held count on.

    Args:
        entry: of ``status.bill``.
        jobs: what the jobs that exist have paid in the pool.
        seconds: since the bill was written.
    """
    held = entry.get("heldCost") or 0.0
    others: float | None = entry.get("deletedJobsCost")
    if others is not None and jobs + others >= held - ROUNDING:
        return others
    gpus = min(entry.get("gpus") or 0, entry.get("gpusHeld") or 0)
    return float(held + cost(gpus * seconds, entry.get("pricePerGpuHour") or 0.0) - jobs)
