"""What jobs have paid in each pool: the part of the pools' bill in which GPUs were held.

Each job sums up its own cost, from the moment at which it takes GPUs to that at which it gives them back. The
allocator looks at other moments, so a sum of GPUs x seconds between its looks would differ from the jobs' by
about a second a launch. So the bill takes the jobs' sums, and keeps beside them what deleted jobs have paid.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ballast_policies.accounting import cost

from ballast_operator.api.cluster_policy_status import PoolBill
from ballast_operator.report.paid import paid_by_others
from ballast_operator.views.assignment import UNKNOWN_POOL, PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """What jobs have paid at one moment, each from its start.

    Attributes:
        at: the moment; None: nothing was looked at yet.
        by_job: uid -> pool -> cost.
        per_second: uid -> pool -> cost a second, of jobs that hold GPUs.
        by_pool: the sum over these jobs.
        others: pool -> what deleted jobs have paid, less what the others had paid before the bill began.
    """

    at: Time | None = None
    by_job: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    per_second: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    by_pool: Mapping[str, float] = dataclasses.field(default_factory=dict)
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of_pool(self, pool: str) -> float:
        """What jobs have paid there since its bill began, deleted ones included."""
        return max(0.0, self.by_pool.get(pool, 0.0) + self.others.get(pool, 0.0))

    def next(
        self,
        jobs: Sequence[JobView],
        pools: Mapping[str, PoolInfo],
        bill: Sequence[PoolBill],
        bill_at: Time | None,
        now: Time,
    ) -> "Paid":
        """The same at ``now``.

        Args:
            jobs: all that exist.
            pools: with the prices that jobs pay.
            bill: as it was written last; a pool that it does not have begins now.
            bill_at: when it was written.
            now: the moment.
        """
        by_job: dict[str, dict[str, float]] = {}
        per_second: dict[str, dict[str, float]] = {}
        for view in jobs:
            by_job[view.uid] = paid = {entry.pool: entry.cost for entry in view.status.pool_costs}
            allocation, since = view.status.allocation, view.unpaid_since
            if allocation is None or since is None:
                continue
            seconds = max(0.0, (now - since).total_seconds())
            per_second[view.uid] = rates = {}
            for part in allocation.on_nodes_by_pool:
                price = pools.get(part.pool, UNKNOWN_POOL).mean_price(since, now)
                rates[part.pool] = cost(float(part.gpus), price)
                paid[part.pool] = paid.get(part.pool, 0.0) + rates[part.pool] * seconds
        gone: defaultdict[str, float] = defaultdict(float)
        for uid in self.by_job.keys() - by_job.keys():
            for pool, amount in self.by_job[uid].items():
                gone[pool] += amount
            for pool, rate in self.per_second.get(uid, {}).items():
                gone[pool] += rate * (now - self.at).total_seconds() if self.at is not None else 0.0
        total = _sum(by_job)
        written = {entry.pool: entry for entry in bill}
        others = {}
        for pool in {*written, *pools, *total}:
            entry = written.get(pool)
            if entry is None:
                others[pool] = -total[pool]
            elif pool in self.others:
                others[pool] = self.others[pool] + gone[pool]
            else:
                seconds = 0.0 if bill_at is None else max(0.0, (now - bill_at).total_seconds())
                others[pool] = paid_by_others(entry.to_dict(), total[pool], seconds)
        return Paid(at=now, by_job=by_job, per_second=per_second, by_pool=total, others=others)


def _sum(by_job: Mapping[str, Mapping[str, float]]) -> defaultdict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for paid in by_job.values():
        for pool, amount in paid.items():
            total[pool] += amount
    return total
