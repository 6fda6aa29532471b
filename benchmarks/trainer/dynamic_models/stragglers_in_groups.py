"""SEMI-migration's tables: seconds of moving columns, and late ranks, by a cost model fitted to them."""

import functools

import numpy as np
from ballast_lab.comparison import Comparison, Point, near
from ballast_policies.planning.tensor_parallel.semi import LinearCost, MoveCosts, decide_semi, semi_seconds
from ballast_policies.planning.tensor_parallel.workload import decide_workload

TABLE_1 = {
    # Seconds an epoch, by GPUs that give columns away, for gamma 0, 0.25, 0.5, 0.75, 1.
    1: ((373, 425, 451, 473, 500), (373, 478, 627, 796, 963)),
    4: ((373, 737, 846, 998, 1113), (373, 779, 971, 1198, 1436)),
}

GAMMAS = (0.0, 0.25, 0.5, 0.75, 1.0)

GROUP = 8


@functools.cache
def fitted_costs():
    """Products M, and the costs of migrating, that fit table I's broadcast-reduce best (least squares).

    Seconds an epoch = T + c0 (of 1 or of 4) + nu gamma c1 + gamma M nu / (e - nu), where nu of e = 8 GPUs
    give columns away. Returns c0 by nu, c1 and M.
    """
    rows, wanted = [], []
    for nu, (broadcast, _) in TABLE_1.items():
        for gamma, seconds in list(zip(GAMMAS, broadcast, strict=True))[1:]:
            rows.append((nu == 1, nu == 4, nu * gamma, gamma * nu / (GROUP - nu)))
            wanted.append(seconds - broadcast[0])
    (one, four, each, products), *_ = np.linalg.lstsq(
        np.array(rows, dtype=float), np.array(wanted), rcond=None
    )
    return {1: float(one), 4: float(four)}, float(each), float(products)


def migration():
    fixed, each, products = fitted_costs()
    rows = []
    for nu, (broadcast, scatter) in TABLE_1.items():
        for gamma, theirs, other in zip(GAMMAS, broadcast, scatter, strict=True):
            ours = 373 + bool(gamma) * fixed[nu] + nu * gamma * each + gamma * products * nu / (GROUP - nu)
            rows.append({"nu": nu, "gamma": gamma, "published": theirs, "scatter": other, "ours": ours})
    return rows


def late_ranks():
    """Speed-ups over chi with one of 8 late, and how SEMI divides four late ones."""
    fixed, each, products = fitted_costs()
    rest, columns = 373 - products, [1000] * GROUP
    rows = []
    for chi in (1, 2, 4, 6, 8):
        late = rest + products * chi
        times = [late] + [373.0] * (GROUP - 1)
        work = [products * chi] + [products] * (GROUP - 1)
        costs = MoveCosts(communicate=LinearCost(fixed=fixed[1], per_column=each / 1000))
        found = {"chi": chi, "half": late / max(373.0, rest + products * chi / 2)}
        for policy in ("resize", "migrate", "semi"):
            decision = decide_workload(policy, times, work, columns, costs=costs)
            found[policy] = late / semi_seconds(decision, times, work, columns, costs=costs)
        found["migrated"], found["left_out"] = decision.migrated[0] / 1000, decision.pruned[0] / 1000
        rows.append(found)
    chis = (8, 6, 4, 2)
    four = decide_semi(
        [rest + products * chi for chi in chis] + [373.0] * 4,
        [products * chi for chi in chis] + [products] * 4,
        columns,
        costs=MoveCosts(communicate=LinearCost(fixed=fixed[4], per_column=each / 1000)),
    )
    share = products / 373
    return {
        "rows": rows,
        "migrating": sum(count > 0 for count in four.migrated),
        "why": four.why,
        "share": share,
    }


def one_late_rank():
    """Figures 9b and 10b: speed-ups at chi = 8 of one late rank of 8."""
    last = late_ranks()["rows"][-1]
    return Comparison(
        (
            near("resizing to the mean (Pri)", 3.5, last["resize"], 0.1),
            near("half of the columns (PriDiffE)", 2.1, last["half"], 0.1),
            Point("migration over SEMI", "far from ideal", last["migrate"] / last["semi"], low=0.2, high=0.9),
        )
    )


def four_late_ranks():
    """Figure 11: of four late ranks of 8, chi 8 to 2, how many migrate by the cost model."""
    ours = late_ranks()["migrating"]
    return Comparison((Point("ranks that migrate", "3", ours, low=3, high=3),))
