"""Step time and memory by the trainer's forecast against measured: 30 random plans of heterogeneous ranks.

A plan is a schedule, a number of ranks with a speed each, a cut of 20 layers, a number of microbatches,
replicas of the pipeline or of single stages, and whether forwards are repeated for the backward. All are
real processes of the trainer.

Time: layers sleep (``calibrated.py``), unevenly, 4 to 12 ms a forward at speed 1 and twice that a backward.
What a prediction needs is measured first, in three rounds of three runs of one plan (1F1B, an even split):
the layers' seconds without and with repeated forwards, by ``fitted_action_seconds`` what the runtime needs
for an action besides, and from four ranks of different speed how fast each kind of rank is. Medians of the
rounds count. A measured step is the fastest of ``--steps``, since other programs only add time.

Memory: the same plans with a GPT that computes. Predicted from one process's profile (``ballast-train
profile``); measured are the bytes of all tensors that each rank holds at the fullest moment, operation by
operation, without the text that it trains on (0.5 MB).

    python benchmarks/trainer/prediction.py [--plans 30] [--seed 7] [--steps 4] [--only time|memory]
    python benchmarks/trainer/prediction.py --only time --from 10 --plans 20      # a part of them
    python benchmarks/trainer/prediction.py --only time --results times.jsonl --minutes 5    # repeat it

With ``--results`` a call continues where the last one ended, and sums up all plans of the file.

The targets are 5 % of the time of each plan, and 10 % of the memory of each rank.
"""

import dataclasses
import itertools
import json
import math
import statistics
import time

import calibrated
import click
import numpy as np
from ballast_lab.simulated_steps import fitted_action_seconds
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.profile import ProfiledLayer, read_profile
from ballast_policies.planning.schedules.registry import DEFAULT_STAGES_PER_RANK, SCHEDULES, stages_of
from ballast_trainer.data import corpus
from ballast_trainer.forecast import Machines, forecast
from ballast_trainer.layer_profiler import layer_rows
from ballast_trainer.profiling.profile import LayerCosts
from predictions.results import Results, of_memory, of_times

LAYERS = 20
SPEEDS = (1.0, 0.85, 0.7, 0.5)
"""Kinds of ranks."""
SCHEDULES_DRAWN = ("1F1B", "GPipe", "ZeroBubbleH1", "Interleaved1F1B", "LoopedBFS", "ZeroBubbleV")
SAMPLES = 2
"""Samples of a microbatch of the GPT."""
GPT = {"name": "gpt", "layers": LAYERS, "args": {"dim": 128, "heads": 4, "context": 64}}
PROFILED_MICROBATCHES = 8
ROUNDS = 3
"""Rounds of what is measured beforehand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One plan; ``data`` replicas of the pipeline, ``replicas`` of its stages (empty: one each)."""

    schedule: str
    speeds: tuple[float, ...]
    bounds: tuple[int, ...]
    microbatches: int
    data: int = 1
    replicas: tuple[int, ...] = ()
    recompute: bool = False

    def job(self, *, steps, samples=1, **settings):
        """Job that runs it with layers that sleep, unless ``settings`` name a model."""
        return calibrated.Job(
            loads=np.repeat(layer_seconds()[None], steps, axis=0),
            ranks=len(self.speeds),
            bounds=self.bounds,
            microbatches=self.microbatches,
            schedule=self.schedule,
            speeds=self.speeds,
            settings={
                "pipeline": {
                    "schedule": self.schedule,
                    "microbatches": self.microbatches,
                    "globalBatchSize": samples * self.microbatches,
                    "replicas": list(self.replicas),
                },
                "parallelism": {"data": self.data},
                "training": {"recompute": self.recompute},
            },
            **settings,
        )

    def forecast(self, rows, machines):
        """Step time by the trainer's own forecast."""
        return forecast(
            self.job(steps=1).config,
            rows,
            Partition(bounds=self.bounds),
            ranks=len(self.speeds),
            machines=machines,
        )


def layer_seconds():
    forward = np.random.default_rng(7).uniform(0.004, 0.012, LAYERS)
    return np.stack([forward, 2 * forward], axis=1)


def random_plans(count, seed):
    """Plans that the trainer accepts; every schedule comes up as often as the others."""
    random = np.random.default_rng(seed)
    plans = []
    while len(plans) < count:
        schedule = SCHEDULES_DRAWN[len(plans) % len(SCHEDULES_DRAWN)]
        kind = SCHEDULES[schedule]
        ranks, data, replicas = int(random.choice([2, 3, 4, 4, 8])), 1, ()
        if kind.build_replicated is not None and random.random() < 0.3:
            replicas = ((2, 1), (1, 2), (1, 2, 1), (2, 1, 1), (2, 2))[int(random.integers(5))]
            ranks = sum(replicas)
        elif ranks >= 4 and random.random() < 0.35:
            data = 2
        positions = ranks // data
        microbatches = positions * data * int(random.integers(2, 4)) * math.lcm(1, *replicas)
        stages = len(replicas) or stages_of(schedule, positions, DEFAULT_STAGES_PER_RANK)
        cuts = random.choice(np.arange(1, LAYERS), stages - 1, replace=False)
        plans.append(
            Plan(
                schedule=schedule,
                speeds=tuple(float(speed) for speed in random.choice(SPEEDS, ranks)),
                bounds=(0, *sorted(map(int, cuts)), LAYERS),
                microbatches=max(4, microbatches) if not kind.equal_rounds else microbatches,
                data=data,
                replicas=replicas,
                recompute=bool(random.random() < 0.25),
            )
        )
    return plans


class Profiled:
    """Measurements made beforehand: layers by whether forwards are repeated, speeds by kind, and actions."""

    def __init__(self, steps):
        even = tuple(LAYERS * rank // len(SPEEDS) for rank in range(len(SPEEDS) + 1))
        plan = Plan(
            schedule="1F1B",
            speeds=(1.0,) * len(SPEEDS),
            bounds=even,
            microbatches=PROFILED_MICROBATCHES,
        )
        # In turns, so that what disturbs the machine for a while meets all three alike.
        rounds = [
            [
                self._run(each, steps)
                for each in (
                    plan,
                    dataclasses.replace(plan, speeds=SPEEDS),
                    dataclasses.replace(plan, recompute=True),
                )
            ]
            for _ in range(ROUNDS)
        ]
        alike, uneven, again = (
            self._median([costs for costs, _ in runs]) for runs in zip(*rounds, strict=True)
        )
        self.rows = {False: self._rows(alike), True: self._rows(again)}
        slower = np.array(alike.total) / np.array(uneven.total)
        ends = itertools.pairwise(even)
        self.speeds = {
            kind: statistics.median(slower[first:end])
            for kind, (first, end) in zip(SPEEDS, ends, strict=True)
        }

        def predicted(action):
            return plan.forecast(self.rows[False], Machines(action_seconds=action)).step_seconds

        self.action_seconds = statistics.median(
            float(fitted_action_seconds(seconds, predicted)) for (_, seconds), _, _ in rounds
        )

    @staticmethod
    def _median(runs):
        fields = [field.name for field in dataclasses.fields(LayerCosts)]
        return LayerCosts(
            **{
                name: tuple(map(statistics.median, zip(*(getattr(run, name) for run in runs), strict=True)))
                for name in fields
            }
        )

    @staticmethod
    def _run(plan, steps):
        ran = calibrated.run(plan.job(steps=2 * steps))
        return ran.costs, min(ran.step_seconds().values())

    @staticmethod
    def _rows(costs):
        return [
            ProfiledLayer(
                forward_seconds=forward / PROFILED_MICROBATCHES,
                backward_seconds=backward / PROFILED_MICROBATCHES,
                optimizer_seconds=optimizer,
            )
            for forward, backward, optimizer in zip(
                costs.forward, costs.backward, costs.optimizer, strict=True
            )
        ]

    def step_seconds(self, plan):
        """Predicted, and without what actions take besides."""
        speeds = tuple(self.speeds[speed] for speed in plan.speeds)
        return [
            plan.forecast(
                self.rows[plan.recompute], Machines(speeds=speeds, action_seconds=action)
            ).step_seconds
            for action in (self.action_seconds, 0.0)
        ]


def times(plans, steps, say):
    profiled = Profiled(steps)
    for plan in plans:
        guess, bare = profiled.step_seconds(plan)
        found = min(calibrated.run(plan.job(steps=steps)).step_seconds().values())
        error = float(100 * (guess / found - 1))
        say(f"{_named(plan)} predicted {guess:.3f} s  measured {found:.3f} s  {error:+.1f} %")
        yield {
            **dataclasses.asdict(plan),
            "predicted_seconds": round(float(guess), 4),
            "measured_seconds": round(found, 4),
            "without_action_seconds": round(float(bare), 4),
            "action_milliseconds": round(1000 * profiled.action_seconds, 3),
            "error_percent": round(error, 2),
        }


def memory(plans, say):
    measured = {}
    for recompute in (False, True):
        config = {
            "totalSteps": 2,
            "model": GPT,
            "pipeline": {"microbatches": 2, "globalBatchSize": 2 * SAMPLES},
            "training": {"recompute": recompute},
        }
        measured[recompute] = read_profile(layer_rows(config, steps=2, at_step=0)).each_layer(2)
    text = corpus._corpus().nbytes  # which every rank keeps
    for plan in plans:
        ran = calibrated.run(plan.job(steps=2, samples=SAMPLES, model=GPT, tracks_memory=True))
        forecast_ranks = plan.forecast(measured[plan.recompute], Machines()).ranks
        guess = [round(forecast_ranks[rank // plan.data].bytes) for rank in range(len(plan.speeds))]
        found = [most - text for most in ran.most_bytes]
        errors = [100 * (a / b - 1) for a, b in zip(guess, found, strict=True)]
        say(f"{_named(plan)} memory by rank " + " ".join(f"{error:+.1f}" for error in errors) + " %")
        yield {
            **dataclasses.asdict(plan),
            "predicted_bytes": guess,
            "measured_bytes": found,
            "error_percent": [round(error, 2) for error in errors],
        }


def _named(plan):
    shape = f"{plan.data} x " * (plan.data > 1) + f"{len(plan.speeds) // plan.data} ranks"
    shape += f" as {'-'.join(map(str, plan.replicas))}" * bool(plan.replicas) + ", again" * plan.recompute
    return f"{plan.schedule:<15} m={plan.microbatches:<3} {shape:<22}"


@click.command(help=__doc__)
@click.option("--plans", "count", default=30, show_default=True)
@click.option("--from", "first", default=0, show_default=True, help="Number of the first plan that is run.")
@click.option("--seed", default=7, show_default=True)
@click.option("--steps", default=4, show_default=True)
@click.option("--only", type=click.Choice(["time", "memory"]), help="Default: both.")
@click.option("--results", type=click.Path(dir_okay=False), help="File of the plans that are done.")
@click.option("--minutes", default=math.inf, help="After which no further plan is begun.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def main(count, first, seed, steps, only, results, minutes, output):
    ends = time.monotonic() + 60 * minutes
    plans = list(enumerate(random_plans(count, seed)))[first:]
    say = click.echo if output == "text" else lambda line: None
    summary = {"benchmark": "trainer_prediction", "layers": calibrated.SAYS, "seed": seed}
    kept, rows = Results(results, seed), {}
    if only != "memory":
        kept.add("time", plans, lambda left: times(left, steps, say), ends)
        rows["rows"] = list(kept.rows["time"].values())
        summary |= of_times(rows["rows"])
    if only != "time":
        kept.add("memory", plans, lambda left: memory(left, say), ends)
        rows["memory_rows"] = list(kept.rows["memory"].values())
        summary |= of_memory(rows["memory_rows"])
    click.echo(json.dumps(summary | (rows if output == "json" else {})))


if __name__ == "__main__":
    main()
