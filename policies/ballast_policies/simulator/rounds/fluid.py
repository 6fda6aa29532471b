"""The fluid baseline, without rounds: every job runs on every GPU type for exactly its share of the time."""

import numpy as np

from ballast_policies.accounting import cost, isolated_seconds
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.solving import Shares, ShareSolver


def run_fluid(
    ledger: Ledger,
    solver: ShareSolver,
    shares: Shares,
    active: np.ndarray,
    now: float,
    next_arrival: float | None,
) -> tuple[float, float]:
    """Book the stretch from ``now`` to the next completion or arrival: (its end in s, busy GPU seconds)."""
    rate = np.zeros(ledger.count)
    alone = shares.partner < 0
    np.add.at(rate, shares.job[alone], (ledger.rate[shares.job[alone]] * shares.share[alone]).sum(axis=1))
    for entry in np.flatnonzero(~alone).tolist():
        first, second = int(shares.job[entry]), int(shares.partner[entry])
        for column in np.flatnonzero(shares.share[entry]).tolist():
            of_first, of_second = solver.shared_rates(first, second, column)
            rate[first] += shares.share[entry, column] * of_first
            rate[second] += shares.share[entry, column] * of_second
    moving = active[rate[active] > 0]
    ends = [] if next_arrival is None else [next_arrival]
    if len(moving):
        ends.append(now + float((ledger.left[moving] / rate[moving]).min()))
    until = min(ends)
    span = until - now
    steps = rate[active] * span
    done = ledger.left[active] - steps <= 1e-9 * ledger.steps[active]
    ledger.left[active] = np.where(done, 0.0, ledger.left[active] - steps)
    ledger.finish[active[done]] = until
    ledger.done[active[done]] = True
    isolated = ledger.isolated_rate(active, len(active))
    ledger.isolated_elapsed[active] += isolated_seconds(steps, isolated)
    for entry in range(len(shares.job)):
        pair = (
            [shares.job[entry]] if shares.partner[entry] < 0 else [shares.job[entry], shares.partner[entry]]
        )
        for row in pair:
            ledger.seconds_on[row] += shares.share[entry] * span
            price = float(ledger.prices @ shares.share[entry])
            ledger.cost[row] += cost(float(ledger.gpus[row]) * span / len(pair), price)
    first_time = active[np.isnan(ledger.first_run[active]) & (rate[active] > 0)]
    ledger.first_run[first_time] = now
    return until, float(ledger.gpus[shares.job] @ shares.share.sum(axis=1)) * span
