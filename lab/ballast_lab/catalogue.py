"""Published figures and tables by name, and the program that makes ours of each, or why there is none."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
INSTALLED, CHECKOUT = HERE.parents[1], HERE.parents[2]
"""The folder of the package ballast_lab; that of Ballast's repository, where this is a checkout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure or table.

    Attributes:
        source: the paper's name, and its figure or table.
        published: what it prints; for a curve or a table of many values, a band or where they are shown.
        program: makes ours; from the folder above ``ballast_lab``, or in the repository.
        arguments: of the program; ``{data}``: the folder of the artifact.
        part: a function of the program that returns the figure, in place of running all of it.
        page: has ours beside what is published.
        artifact: the name of the folder of other people's files that it reads; empty: none.
        within: of a part that returns rows, the band of their ``ours`` around ``published``, 0.05: 5 %.
        outside: how many of ours are outside their band.
        known: why they are.
        why_not: why it is not made; then there is no program.
    """

    source: str
    published: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    part: str = ""
    page: str = ""
    artifact: str = ""
    within: float = 0.0
    outside: int = 0
    known: str = ""
    why_not: str = ""

    @property
    def path(self) -> Path:
        """Path of the program, whether it is there or not."""
        return (INSTALLED if self.program.startswith("ballast_lab/") else CHECKOUT) / self.program


def _gavel(name: str, at: str, what: str, *options: str) -> Figure:
    return Figure(
        source=f"Gavel, {what}",
        published="printed beside ours",
        program="lab/benchmarks/simulator/published.py",
        arguments=("--figure", name, "--at", at, *options),
        part="main",
        page="lab/docs/published.md",
    )


def _of_page(program: str, page: str, source: str, published: str, part: str, **more: Any) -> Figure:
    """A part of a page that a program writes."""
    return Figure(source=source, published=published, program=program, part=part, page=page, **more)


_planner = functools.partial(
    _of_page, "lab/benchmarks/planning/published_page.py", "lab/docs/published-planners.md"
)
_mechanism = functools.partial(_of_page, "lab/benchmarks/simulator/mechanism.py", "lab/docs/published.md")
_prices = functools.partial(_of_page, "lab/benchmarks/prices/page.py", "lab/docs/spot-figures.md")
_dynamic = functools.partial(
    _of_page, "benchmarks/trainer/published_page.py", "lab/docs/published-dynamic-models.md"
)


_semi = functools.partial(
    _of_page,
    "benchmarks/trainer/dynamic_models/stragglers_in_groups.py",
    "lab/docs/published-dynamic-models.md",
)
_resizing = functools.partial(
    _of_page, "benchmarks/trainer/resizing.py", "lab/docs/published-dynamic-models.md"
)


def _not_made(source: str, why: str) -> Figure:
    return Figure(source=source, why_not=why)


def _artifact(module: str, source: str, published: str, page: str, *options: str, **more: Any) -> Figure:
    """Made from the files of an artifact, in the folder of the module's name."""
    return Figure(
        source=source,
        published=published,
        program=f"ballast_lab/{module}.py",
        arguments=("--data", "{data}", *options),
        part="main",
        page=page,
        artifact=module.replace("_", "-"),
        **more,
    )


MEASURED_GPUS = "measured on GPUs that are not here, with times that are not printed"
PROFILES = "measured; the seconds of its layers by microbatch are not printed"
IMAGENET = "trains VGG-16 on ImageNet on 16 GPUs for days"
CHIMERA = "Chimera's schedule is not built: it holds each weight twice"
SEEDS = ("--seeds", "0", "1", "2")
FIGURES = {
    "gavel-physical": _gavel("physical", "0", "its physical traces (table 5.3) in its own simulator"),
    "gavel-table-5.3": _mechanism(
        "Dissertation, table 5.3: on GPUs and simulated",
        "3.4 and 3.7 h to 21.3 and 22.1 h",
        "physical",
        outside=1,
        known="its measured windows are other ones; its own simulator has 1.24 on its trace",
    ),
    "gavel-table-5.4": _mechanism(
        "Dissertation, table 5.4: overhead with and without leases",
        "0.11 to 2.91 %",
        "renewals",
        outside=5,
        known="a half of the leases is renewed here, by its rules and by ours; by the table five of six are",
    ),
    "gavel-headlines": _mechanism(
        "Dissertation, section 5.7.3: ratios in the text",
        "1.08 to 3.5",
        "headlines",
        outside=2,
        known="for gangs its own curves of seed 0 have 1.94; space sharing at 2.6 jobs/h was not run",
    ),
    "gavel-5.9": _gavel("5.9", "1.2", "figure 5.9 at 1.2 jobs/h"),
    "gavel-5.10": _gavel("5.10", "0.4", "figure 5.10 at 0.4 jobs/h"),
    "gavel-5.11": _gavel("5.11", "0.4", "figure 5.11 at 0.4 jobs/h"),
    "gavel-5.11-rho": _gavel("5.11-rho", "0.4", "figure 5.11 at 0.4 jobs/h, rho"),
    "gavel-5.12-5.13": Figure(
        source="Gavel, figures 5.12 and 5.13",
        published="printed beside ours",
        program="lab/benchmarks/simulator/published_hierarchical.py",
        part="main",
        page="lab/docs/published.md",
        outside=36,
        known="Gavel's water filling stops before everybody is bottlenecked",
    ),
    "gavel-5.14": Figure(
        source="Gavel, figure 5.14",
        published="minutes for 5 teams with 2,048 jobs, up to 10 for 512 jobs that share",
        program="benchmarks/allocation/growth.py",
        arguments=("--trials", "1"),
        page="docs/policies.md",
    ),
    "gavel-cost": Figure(
        source="Gavel, section 5.7.3: cost with and without deadlines",
        published="1.4 and 1.2 times cheaper",
        program="lab/benchmarks/prices/gavel_cost.py",
        part="comparison",
        outside=1,
        known="ResNet-50 is the cheapest on P100s by this table, and misses its tightest deadlines as well",
        page="lab/docs/spot-figures.md",
    ),
    "gavel-5.15": _mechanism(
        "Dissertation, figure 5.15: length of a round, ideal shares", "6 min as ideal shares", "rounds"
    ),
    "gavel-5.16": _mechanism("Dissertation, figure 5.16: estimated speeds", "very small loss", "estimated"),
    "gavel-5.1": _not_made(
        "Dissertation, figures 1.4 and 5.1: speeds by GPU type",
        "its speeds are those of prices-table-6.1",
    ),
    "gavel-5.4": _not_made("Dissertation, figure 5.4: speeds of pairs", "printed as colours alone"),
    "gavel-fifo-single": _gavel("fifo-single", "1.2", "FIFO on one GPU at 1.2 jobs/h"),
    "gavel-fifo-multiple": _gavel("fifo-multiple", "0.4", "FIFO with gangs at 0.4 jobs/h"),
    "gavel-makespan": _gavel("makespan", "100", "makespan of 100 jobs", *SEEDS),
    "gavel-priorities": _gavel("priorities", "1", "priorities at 1 job/h", *SEEDS),
    "pipedream-2.1": _not_made("Dissertation, figure 2.1: stalls of data parallelism", MEASURED_GPUS),
    "pipedream-2.2": _planner(
        "Dissertation, table 2.2: PipeDream's configurations",
        "15-1; 5.3 times data parallelism",
        "pipedream",
        outside=2,
        known="two levels use whole servers for the outer stages; what hides exchanges is assumed",
    ),
    "pipedream-2.3": _not_made("Dissertation, table 2.3: cloud against dedicated clusters", MEASURED_GPUS),
    "pipedream-2.9": _not_made("Dissertation, figures 2.9, 2.10, 2.12: accuracy of VGG-16", IMAGENET),
    "pipedream-2.11": _not_made("Dissertation, figure 2.11: stalls by precision", MEASURED_GPUS),
    "pipedream-2.13": _planner(
        "Dissertation, figure 2.13: over no pipelining",
        "2 or more; VGG-16 14.9",
        "without_pipelining",
        outside=1,
        known="4 GPUs are at most 4 times as fast as one at a time, but for transfers",
    ),
    "pipedream-2.14": _planner(
        "Dissertation, figure 2.14: predicted and real throughput", "strongly linear", "predicted_and_played"
    ),
    "pipedream-2.15": _planner(
        "Dissertation, figure 2.15: memory by stage",
        "on par with data parallelism",
        "stashed_memory",
        outside=1,
        known="the first stage has four versions of the convolutions' outputs, which are most of the memory",
    ),
    "pipedream-2.16": _planner(
        "Dissertation, figure 2.16: bytes a sample", "VGG-16 far less, ResNet-50 more", "bytes_a_sample"
    ),
    "pipedream-2.17": _planner(
        "Dissertation, figure 2.17: inputs in flight", "4 and 7 are the fastest", "in_flight"
    ),
    "2bw-3.5": _of_page(
        "benchmarks/trainer/two_versions.py",
        "lab/docs/published-planners.md",
        "Dissertation, figure 3.5 and table 3.1, of a small GPT",
        "as vanilla but for the beginning",
        "comparison",
        outside=1,
        known="600 steps are the beginning: the paper's curves meet after 100,000",
    ),
    "2bw-3.6": _planner(
        "Dissertation, figures 3.6 and 3.10: throughput",
        "1.6 and 1.15 times flushes",
        "flushes",
        outside=1,
        known="transfers between stages are not printed: 2BW is 8 times one at a time without them, not 6.1",
    ),
    "2bw-3.7": _planner(
        "Dissertation, figures 3.7 and 3.11: memory",
        "inter-layer, flush, 2BW, GPipe",
        "footprints",
        outside=1,
        known="GPipe's inputs weigh less than a second version of the weights by the closed forms",
    ),
    "2bw-3.8": _not_made("Dissertation, figure 3.8: throughput by batch", PROFILES),
    "2bw-3.9": _planner(
        "Dissertation, figure 3.9: the largest model", "almost 30 billion, 64 stages", "largest_model"
    ),
    "2bw-3.12": _not_made("Dissertation, figure 3.12: recomputation by microbatch", PROFILES),
    "ptdp-4.1": _planner("Dissertation, table 4.1: parameters", "1.7 to 1008 billion", "parameters"),
    "ptdp-4.1-degrees": _planner(
        "Dissertation, table 4.1: degrees",
        "1 x 1 to 8 x 64",
        "degrees",
        outside=4,
        known="a tensor degree of 8 costs more FLOP/s than a deeper pipeline idles, by figure 4.7's 1.3",
    ),
    "ptdp-4.2": _planner(
        "Dissertation, section 4.5.1 and table 4.2: days of training", "23 to 156 days", "days"
    ),
    "ptdp-4.4": _planner(
        "Dissertation, figures 4.3 and 4.4: bubbles of schedules", "(p - 1) / (m v)", "interleaved"
    ),
    "ptdp-4.6": _planner("Dissertation, figure 4.6: bubble by data-parallel size", "(n - d) / b'", "bubbles"),
    "ptdp-4.7": _not_made("Dissertation, figure 4.7: throughput by microbatch", MEASURED_GPUS),
    "ptdp-4.8": _planner(
        "Dissertation, figure 4.8: microbatch size",
        "best at 4",
        "microbatches",
        outside=1,
        known="2 and 4 differ by 2 % at B = 128; the seconds of a microbatch are not printed",
    ),
    "ptdp-4.3.5": _planner(
        "Dissertation, section 4.3.5: recomputing every c-th layer", "every 1 or 2", "recomputed"
    ),
    "ptdp-4.10": _not_made("Dissertation, figures 4.10 to 4.12, 4.16: FLOP/s a GPU", MEASURED_GPUS),
    "ptdp-4.13": _planner(
        "Dissertation, figure 4.13: tensor against pipeline degree",
        "best with t = 8",
        "tensor_and_pipeline",
        outside=2,
        known="as for the degrees of table 4.1",
    ),
    "ptdp-4.14": _planner(
        "Dissertation, figures 4.14 and 4.15: both against data parallelism",
        "slower with each doubling",
        "against_data",
        outside=3,
        known="nothing hides the exchange of gradients here, which outweighs the bubble of a few stages",
    ),
    "ptdp-4.17": _planner(
        "Dissertation, figure 4.17: recomputation", "up to 33 % less at small batches", "recomputing"
    ),
    "ptdp-4.18": _not_made("Dissertation, figure 4.18: scatter and gather", MEASURED_GPUS),
    "amp-6-11": _planner(
        "AMP, tables 6 to 11: the best measured steps", "1.10, 1.54 and 1.77 times Megatron", "amp"
    ),
    "prices-6.1": _prices("Dissertation, figure 6.1: prices over time", "p3.16xlarge none", "price_changes"),
    "prices-table-6.1": _prices(
        "Dissertation, table 6.1: speed per dollar",
        "0.4 to 1.8 of a K80's",
        "cost_normalised",
        outside=9,
        known="it states no batch sizes, by which ResNet's speeds differ",
    ),
    "prices-6.2": _prices(
        "Dissertation, figure 6.2: availability", "hours on AWS, at least daily on GCP", "lifetimes"
    ),
    "prices-table-6.2": _prices(
        "Dissertation, table 6.2: transfers over compute", "0.006 to 9.13 %", "egress"
    ),
    "prices-6.3": _prices(
        "Dissertation, figure 6.3: prices across clouds", "the cheapest changes", "across_clouds"
    ),
    "prices-table-6.3": _prices("Dissertation, table 6.3: best-case discounts", "2.7 to 8.0", "discounts"),
    "prices-6.4": _prices(
        "Dissertation, figure 6.4: price of a GPU by size",
        "more stable with more GPUs",
        "by_size",
        outside=1,
        known="p2.16xlarge of us-east-1c rose to its price on demand for some of the four weeks",
    ),
    "prices-6.5": _prices(
        "Dissertation, figure 6.5: moving between machines",
        "up to 3.5, by moving 1.4",
        "dynamic",
        outside=1,
        known="the prices allow 1.11 by moving, with all of them known beforehand",
    ),
    "prices-6.6": _prices(
        "Dissertation, figure 6.6: moving, by length",
        "up to 1.4, small below 2 days",
        "durations",
        outside=1,
        known="as for figure 6.5",
    ),
    "amp-5": _not_made(
        "AMP, figure 5: an example of device placement", "its tables 6 to 11 have no placements to compare"
    ),
    "dynmo-cases": _dynamic("DynMo, reviews: six cases on 8 GPUs", "1.17 to 4.52", "cases_judged"),
    "dynmo-table-1": _dynamic(
        "DynMo, supplement, table 1", "4 to 61 of 10,000 iterations", "overheads_judged"
    ),
    "dynmo-table-2": _dynamic("DynMo, supplement, table 2", "1.2 to 1.39", "scaling", within=0.1),
    "dynmo-figure-1": _not_made("DynMo, supplement, equation 1 and figure 1: Chimera's bubble", CHIMERA),
    "dynmo-figure-2": _not_made(
        "DynMo, supplement, figure 2: sparse products",
        "Sputnik's kernels on an A100; benchmarks/trainer/sparse.py has ours",
    ),
    "dynmo-figure-3": _dynamic("DynMo, supplement, figure 3", "no numbers", "unstable_judged"),
    "dynmo-figure-4": _dynamic("DynMo, supplement, figure 4", "no numbers; rises", "repacking_judged"),
    "semi-table-1": _dynamic("SEMI-migration, table I", "373 to 1,113 s an epoch", "migration", within=0.03),
    "semi-3": _resizing(
        "SEMI-migration, figure 3: imputations",
        "same, zero, average",
        "imputations",
    ),
    "semi-5": _resizing(
        "SEMI-migration, figures 5 and 6: all ranks resized",
        "up to 23.5 % faster, less accurate with gamma",
        "homogeneous",
        outside=1,
        known="by the costs of table I products are 73 % of a step, and copies of columns are not in them",
    ),
    "semi-7": _resizing("SEMI-migration, figures 7 and 8: one rank resized", "loses less", "one_late"),
    "semi-9": _semi("SEMI-migration, figures 9 and 10: speed", "3.5 and 2.1 at chi 8", "one_late_rank"),
    "semi-11": _semi("SEMI-migration, figure 11: four late ranks", "3 migrate", "four_late_ranks"),
    "semi-accuracy": Figure(
        source="SEMI-migration, figures 9a and 10a, on four real ranks",
        published="3.5 times as fast at chi 8, at -1.3 % of accuracy",
        program="benchmarks/trainer/stragglers.py",
        arguments=("--steps", "60", "--chi", "2", "--chi", "8"),
        page="docs/figures.md",
    ),
    "arena": _artifact(
        "arena", "Arena, simulated Philly trace", "printed below ours", "lab/docs/published-allocation.md"
    ),
    "cant-be-late": _artifact(
        "cant_be_late",
        "Can't Be Late, second half of the windows",
        "uniform progress and greedy, as built here",
        "lab/docs/spot-figures.md",
        "--windows",
        "75:",
    ),
    "sailor": _artifact(
        "sailor",
        "Sailor, its 18 measured plans",
        "measured, beside ours",
        "lab/docs/sailor.md",
        outside=1,
        known="three peaks contradict others or are not explained; the median error of peaks is 2.7 %",
    ),
    "shockwave": _artifact(
        "shockwave",
        "Shockwave, 120 jobs on 32 V100s",
        "printed below ours",
        "lab/docs/published-allocation.md",
        outside=1,
        known="without weights each job is owed the same part of the GPUs, by Shockwave of the time",
    ),
    "skynomad": _artifact(
        "skynomad", "SkyNomad, all of its cells", "1.077 of the optimum, mean", "lab/docs/spot-figures.md"
    ),
    "skynomad-elastic": dataclasses.replace(
        _artifact("skynomad", "16 H100 or fewer, on SkyNomad's probes", "none", "lab/docs/spot-figures.md"),
        part="elastic",
    ),
}
