"""A trace of short jobs in Gavel's format: they last seconds, so that a live run is over in minutes."""

import random
from pathlib import Path

from ballast_policies.simulator.workloads import Workload, read_trace
from ballast_policies.throughput.table import JobType, ThroughputTable

TYPES = (
    *(f"ResNet-18 (batch size {size})" for size in (16, 32, 64, 128, 256)),
    *(f"ResNet-50 (batch size {size})" for size in (16, 32, 64, 128)),
    *(f"Transformer (batch size {size})" for size in (16, 32, 64, 128, 256)),
    *(f"LM (batch size {size})" for size in (5, 10, 20, 40, 80)),
    *(f"Recommendation (batch size {size})" for size in (512, 1024, 2048, 4096, 8192)),
    "A3C",
    "CycleGAN",
)
"""Gavel's job types."""
GANGS = ((0.65, 1), (0.85, 2), (1.0, 4))
"""(cumulative probability, GPUs)."""
SECONDS_ON_V100 = (30.0, 90.0)
"""Least and most seconds of a job alone on V100s, uniform."""
MEAN_GAP_SECONDS = 8.0
LEAST_STEPS_PER_SECOND = 0.5


def write_trace(
    path: Path,
    table: ThroughputTable,
    *,
    jobs: int,
    seed: int,
    seconds_on_v100: tuple[float, float] = SECONDS_ON_V100,
    mean_gap_seconds: float = MEAN_GAP_SECONDS,
) -> Workload:
    """Draw ``jobs`` jobs, write them to ``path`` as Gavel would, and read them back."""
    draw = random.Random(seed)
    lines, arrival = [], 0.0
    for _ in range(jobs):
        job_type = _draw_type(draw, table)
        seconds = draw.uniform(*seconds_on_v100)
        steps = max(1, round(seconds * table.alone(job_type, "v100")))
        columns = [job_type.name, "-", "-", "-", "0", str(steps), str(job_type.gpus), "1", "-1"]
        lines.append("\t".join([*columns, f"{arrival:.3f}"]))
        arrival += draw.expovariate(1.0 / mean_gap_seconds)
    path.write_text("\n".join(lines) + "\n")
    return read_trace(path)


def _draw_type(draw: random.Random, table: ThroughputTable) -> JobType:
    """A job type of Gavel's that runs on every GPU type, not slower than a step in two seconds."""
    while True:
        drawn = draw.random()
        gpus = next(size for below, size in GANGS if drawn < below)
        job_type = JobType(name=draw.choice(TYPES), gpus=gpus)
        known = all(job_type in table.alone_rates[kind] for kind in table.gpu_types)
        if known and all(table.alone(job_type, kind) >= LEAST_STEPS_PER_SECOND for kind in table.gpu_types):
            return job_type
