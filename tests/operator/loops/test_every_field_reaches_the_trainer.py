"""What the trainer can do, a TrainingJob can ask for: each field of its configuration arrives in the plan."""

from ballast_policies.contract.job.job import JobConfig

from tests.contract.examples import EXAMPLES, at_default
from tests.operator.loops.simulated.simulation import Simulation

EXAMPLE: JobConfig = EXAMPLES["config"]

EXCLUDED = {
    "pipeline.replicas",
    "plan",
    "training.rate_factor",
    "data.collate",
    "evaluation.data.pad_to_multiple_of",
    "evaluation.data.packing",
    "evaluation.data.shift_labels",
}
"""Fields at their defaults in the example: it has tensor and data parallelism, which exclude replicas, a
decay of the learning rate, which excludes a schedule of the user's own, data that is padded, and data for
evaluations that a function collates. It may shrink, which a plan
excludes: see ``mixed/test_life.py``."""


def test_the_example_sets_every_field():
    """A new field that it leaves at its default would not be seen to arrive."""
    assert set(at_default(EXAMPLE)) == EXCLUDED


async def test_every_field_of_a_training_job_arrives_at_its_trainer():
    """Tensor and data parallelism, stragglers, schedule, metrics and all the rest, as the user wrote them."""
    simulation = Simulation(nodes=dict.fromkeys("ab", ("fast", 8)), roundSeconds=600)
    await simulation.run_job("full", **{**EXAMPLE.to_dict(), "totalSteps": EXAMPLE.total_steps})
    assert simulation.configuration("full") == EXAMPLE
    allocation = simulation.status("full").allocation
    assert (allocation.gpus, allocation.gpus_per_pod) == (16, 4)
