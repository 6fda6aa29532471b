# ruff: noqa: E501 - lines of the page are as long as those of other pages
"""The page on published dynamic models and stragglers, from what was recorded."""

from ballast_lab.comparison import table
from dynamic_models.balancing import CHANGED_EVERY, MIN_GAIN, PAUSE_STEPS, STEPS
from load_curves import PUBLISHED
from rebalanced.following import PAUSE_SECONDS


def percent(ours, theirs):
    return f"{100 * (ours / theirs - 1):+.0f} %"


def page(found):
    six = [
        (
            row["case"],
            PUBLISHED[row["case"]],
            f"{row['settled']:.2f}",
            f"{row['even']:.2f}",
            f"{row['stays']:.2f} of {row['allowed']:.2f}",
            f"{100 * row['of_the_best']:.1f} %",
            row["moves"],
            f"{100 * row['overhead']:.2f} %",
        )
        for row in found["six_cases"]
    ]
    ranks = {}
    for row in found["scaling_by_ranks"]:
        ranks.setdefault(row["case"], []).append(f"{row['even']:.2f}, {100 * row['of_the_best']:.1f} %")
    two = [
        (r["layers"], r["gpus"], r["published"], f"{r['ours']:.2f}", percent(r["ours"], r["published"]))
        for r in found["scaling"]
    ]
    one = [
        (
            row["layers"],
            "/".join(map(str, row["published"])),
            "/".join(f"{PAUSE_STEPS * each['moves']:.1f}" for each in row["ours"]),
            "/".join(str(each["moves"]) for each in row["ours"]),
            "/".join(str(each["decide_ms"]) for each in row["ours"]),
        )
        for row in found["overheads"]
    ]
    packed = [
        (
            row["layers"],
            *(f"{row['per_gpu'][str(r)]:.2f} ({row['throughput'][str(r)]:.2f})" for r in (8, 6, 4, 2)),
            f"{row['mean_gpus']:.1f}",
        )
        for row in found["repacking"]
    ]
    network = [
        (r["layers"], f"{r['slowest']:.0f}", f"{r['exact']:.2f}", f"{r['network']:.2f}")
        for r in found["unstable_network"]
    ]
    moved = [
        (
            r["nu"],
            r["gamma"],
            r["published"],
            f"{r['ours']:.0f}",
            percent(r["ours"], r["published"]),
            r["scatter"],
        )
        for r in found["migration"]
    ]
    late = [
        (
            r["chi"],
            f"{r['resize']:.2f}",
            f"{r['half']:.2f}",
            f"{r['migrate']:.2f}",
            f"{r['semi']:.2f}",
            f"{r['migrated']:.2f}",
            f"{r['left_out']:.2f}",
        )
        for r in found["late_ranks"]["rows"]
    ]
    published = {"chi": "published, chi = 8", "resize": 3.5, "half": 2.1}
    late.append((published["chi"], published["resize"], published["half"], "", "", "", ""))
    return f"""# Published dynamic models and stragglers

Written by `python benchmarks/trainer/published_page.py` from `published_recorded.json`: values that DynMo (its supplement and its
reviews) and SEMI-migration (Wang et al., arXiv 2401.11469) print, beside ours. **Everything here is simulated**: there are no 8 to 720
GPUs here. What real ranks show is in [figures.md](../../docs/figures.md).

## Six dynamic models on 8 GPUs (reviews)

{table(("case", "published speed-up", "largest stage, even split over best", "ours over the even split", "over the best split that stays", "of the best cut in every step", "moves", "moving"), six)}

The paper prints speed-ups, not loads: each case is a family of load curves with one parameter, set so that the settled model allows the published
speed-up; the second column against the third is no result. The fourth is lower because layers get cheaper during the training, not before it. The
others: what the balancer wins over the one partition that is best for the whole training, of what is to be won, and the part of the speed of a partition
chosen again in every step, without cost. Loads change every {CHANGED_EVERY} of {STEPS} steps of about 0.1 s, are followed by the trainer's own
profile, looks and decisions (`minGain` {MIN_GAIN}), and a move takes {1000 * PAUSE_SECONDS:.0f} ms.

The same on other numbers of ranks (speed-up over the even split, part of the best cut in every step), 6 layers a rank:

{table(("case", "4 ranks", "8 ranks", "16 ranks"), [(case, *values) for case, values in ranks.items()])}

## Scaling (supplement, table 2): gradual pruning to 90 %

{table(("layers", "GPUs", "published", "ours", "deviation"), two)}

How uneven the weights of the layers are is set by the row of 24 layers on 8 GPUs; all others follow. Runs that were out of memory are left out.

## Overhead (supplement, table 1)

{table(("layers", "published, iterations of 10,000", "ours, iterations", "moves", "a decision, CPU ms"), one)}

In each column: partition by time, by parameters, diffusion by time, by parameters. Ours: moves times the half step that a move takes (60 ms of 120 on four
real ranks), and decisions; nothing moves where the predicted gain does not pay for it. 10,000 iterations make the published values 0.04 to 0.6 %.

## Repacking (supplement, figure 4)

{table(("layers", "8 GPUs", "6", "4", "2", "mean GPUs"), packed)}

Throughput of a GPU relative to 8 GPUs (of the job in parentheses), of the pruned model; the mean over the training of the fewest GPUs that keep the dense
model's pace (`repack.maxSlowdown: 0.1`). The figure prints no numbers; it rises as GPUs are released, as here. The reviews put the gain of repacking at 4 to 11 %.

## Unstable network (supplement, figure 3): 90 pipelines of 8 GPUs

{table(("layers", "links up to ... times slower", "speed-up of `exact` over the even split", "of `network`"), network)}

Each link is slower by a half-normal delay up to the limit; a step waits for the slowest of the 90 pipelines; a transfer takes a tenth of a stage's time at
full bandwidth. The figure prints no numbers. In the paper the speed-up grows with the delays; here links count for every partition, so the gain of balancing by time
alone shrinks.

## Migration of columns (SEMI, table I): seconds an epoch

{table(("GPUs that give columns", "gamma", "published, broadcast-reduce", "our cost model", "deviation", "published, scatter-gather"), moved)}

`planning.tensor_parallel` with its four numbers (the fixed part for one and for four GPUs, a column's part, the products' seconds) fitted to the eight values of
broadcast-reduce at gamma above 0. Scatter-gather, up to 1.9 times as long there, is timed alone, on gloo (`benchmarks/trainer/stragglers.py --collectives`); the trainer has
the other way.

## Stragglers (SEMI, section V): one of 8 GPUs late

{table(("chi", "ZERO, to the mean (Pri)", "ZERO, half of the columns (PriDiffE)", "migration", "SEMI", "migrated", "left out"), late)}

With the costs fitted above, by which products are {100 * found["late_ranks"]["share"]:.0f} % of a step: no policy is run here. SEMI takes the split with the
shortest step, and of those within 1 % the one that loses least accuracy: at chi = 8 the paper loses 1.3 % (Pri) and 0.3 % (PriDiffE), [ours](../../docs/figures.md#trainer).

Four of 8 GPUs late by 8, 6, 4 and 2: the paper's sweet spot is 3 that migrate; ours, by its costs: {found["late_ranks"]["migrating"]}
({found["late_ranks"]["why"]}).

## Resizing (SEMI, figures 3 and 5 to 8): percent of accuracy

`python benchmarks/trainer/resizing.py`: a small model of text shared by four ranks in one process, trained for 200 steps. Figure 3:

{found["imputations"]}

The trainer keeps no gradients from one choice of columns to the next, so `same` is `zero`. Figures 5 and 6, with the speed by the costs of table I:

{found["homogeneous"]}

Figures 7 and 8:

{found["one_late"]}

## Not built

- **Chimera's schedule** (supplement, equation 1): with 8 ranks, 8 microbatches and a backward of two forwards it idles 1/3 of the time and holds
  each weight twice; the trainer's interleaved 1F1B idles 7/23 with two stages a rank, zero-bubble schedules less, with each weight once.
- **Microbatches after a repack** (supplement, D.5, which DynMo does not have either): a job keeps them. Fewer ranks idle less with as many, and other
  sizes would change what a layer that depends on its microbatch computes.
- **Freed GPUs as replicas of the same job** (E.2, PipeTransformer's): they go to whichever job the policy serves next, which may be the same one grown again.
- **Comparison with a mixture-of-experts baseline** (capacity and drop, as Tutel and Megatron): the trainer has both (`experts.capacityFactor`, `dropTokens`). What
  dropped tokens cost in loss shows at sizes that do not fit here.
- **Linear to 1,000 GPUs**: the largest published run has 720. Pipelines side by side are alike here; they wait for the slowest, as above, and for their exchange of gradients.
"""
