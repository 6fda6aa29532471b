"""What is planned for a job with ``planner``, launched: the trainer accepts it, and forecasts the same."""

import numpy as np
import pytest
from ballast_operator.views.spec import read_spec
from ballast_policies.contract.decode import decode
from ballast_policies.planning.profile import ProfiledLayer
from ballast_trainer.config import read_job_config
from ballast_trainer.forecast import Machines, forecasts

from tests.operator.views.test_planned_spec import a_job
from tests.support.examples import first_daily

SIZED = ("activationBytes", "outputBytes", "gradientBytes", "repeatedBytes")


def layers_of(draw, count: int) -> list[dict[str, float]]:
    weights = draw.uniform(0.2, 2.0, count) * 1e9
    return [
        {
            "forwardSeconds": float(draw.uniform(0.01, 1.0)),
            "backwardSeconds": float(draw.uniform(0.01, 2.0)),
            "heldBytes": float(4 * held),
            "weightBytes": float(held),
            **{name: float(draw.uniform(0, 1) * (draw.random() < 0.7) * held) for name in SIZED},
        }
        for held in weights
    ]


def as_launched(rows: list[dict[str, float]], scale: float, *, recompute: int) -> list[ProfiledLayer]:
    """The profile's layers as the trainer would measure them: ``scale`` times as many samples."""
    found, before, repeated = [], 0.0, False
    for number, row in enumerate(rows, start=1):
        timed = {name: row[name] * scale for name in (*SIZED, "forwardSeconds", "backwardSeconds")}
        kept = timed["activationBytes"]
        timed["activationBytes"] += before * repeated
        repeated = recompute > 0 and number % recompute == 0
        if repeated:
            timed["backwardSeconds"] += timed["forwardSeconds"]
            timed |= {"activationBytes": before, "repeatedBytes": max(kept, timed["repeatedBytes"])}
        before = timed["outputBytes"]
        found.append(decode(ProfiledLayer, {**row, **timed}))
    return found


def test_the_slowest_gpus_have_the_first_layers_where_the_fastest_lack_the_memory():
    """With two microbatches in flight four layers take 20 GB, with one 12; the trainer agrees."""
    row = {"forwardSeconds": 0.1, "backwardSeconds": 0.2, "heldBytes": 1e9, "activationBytes": 2e9}
    gpus = [{"gpuType": kind, "speed": speed, "memory": "17G"} for kind, speed in (("slow", 1), ("fast", 2))]
    job = a_job(
        {"profiles": [{"microbatchSize": 1, "layers": [row] * 6}], "gpus": gpus},
        mixedPools="Allowed",
        pipeline={"minStages": 2, "maxStages": 2, "microbatches": 8, "globalBatchSize": 8},
        parallelism={"data": 1, "gpusPerPod": 1},
    )
    spec, problem = read_spec(job)
    assert spec is not None, problem
    (planned,) = spec.planned_launches[("slow", 1), ("fast", 1)]
    assert planned.degrees.layers == (2, 4)
    config = read_job_config(spec.with_degrees(planned.degrees).config.to_dict())
    rows = [decode(ProfiledLayer, row)] * 6
    found = forecasts(config, rows, ranks=2, machines=Machines(speeds=(1.0, 2.0)))[0]
    assert found.formula_seconds == pytest.approx(planned.degrees.step_seconds)
    assert tuple(rank.bytes for rank in found.ranks) == pytest.approx(planned.memory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(24), 4))
def test_the_trainer_runs_each_plan_and_forecasts_its_bytes_and_its_step(seed):
    """With tensor, data and ZeRO degrees, recomputation, also of some layers, two GPU types, two pools."""
    draw = np.random.default_rng(seed)
    count, zero, batch = int(draw.integers(1, 8)), int(draw.integers(0, 4)), int(draw.choice([8, 12, 64]))
    of_tensor = {t: layers_of(draw, count) for t in (1, 2, 4)[: int(draw.integers(1, 4))]}
    size, data = int(draw.choice([1, 2])), 2 if zero else 1
    gpus = [
        {"gpuType": kind, "speed": float(draw.choice([0.5, 1, 2])), "memory": f"{draw.integers(12, 60)}G"}
        for kind in "ab"
    ]
    profiles = [{"tensor": t, "microbatchSize": size, "layers": rows} for t, rows in of_tensor.items()]
    job = a_job(
        {"profiles": profiles, "gpus": gpus},
        mixedPools="Allowed",
        pipeline={"minStages": 1, "maxStages": count, "microbatches": batch, "globalBatchSize": batch},
        parallelism={"data": data, "zeroStage": zero, "gpusPerPod": 1},
    )
    spec, problem = read_spec(job)
    assert spec is not None or "no plan fits the memory" in problem
    for types, plans in spec.planned_launches.items() if spec else ():
        for degrees in (plan.degrees for plan in plans):
            config = read_job_config(spec.with_degrees(degrees).config.to_dict())
            rows = as_launched(
                of_tensor[degrees.tensor], batch / degrees.microbatches / size, recompute=degrees.repeated
            )
            shared = config.parallelism
            rows = [
                row.shared_by(
                    shared.optimizer_shares, gradients=shared.gradient_shares, weights=shared.weight_shares
                )
                for row in rows
            ]
            speed = {gpu["gpuType"]: gpu["speed"] for gpu in gpus}
            speeds = tuple(speed[kind] for kind, gpus_there in types for _ in range(gpus_there))
            found = forecasts(config, rows, ranks=len(speeds), machines=Machines(speeds=speeds))[0]
            assert max(rank.bytes for rank in found.ranks) == pytest.approx(degrees.memory_bytes, rel=1e-6)
            assert found.formula_seconds == pytest.approx(degrees.step_seconds, rel=1e-9)
