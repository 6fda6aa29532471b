"""Where a pipeline without a flush drains: a function of the configuration alone."""

import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_trainer.pipeline.layout import LONGEST_RUN, next_drain, steps_between_drains

PLAIN = {"totalSteps": 1000, "model": {"name": "gpt"}, "rebalance": {"enabled": False}}


def drains(fields, count=5):
    """The first steps at which the pipeline is empty."""
    config = JobConfig.from_mapping({**PLAIN, **fields})
    found = [next_drain(config, 0)]
    while len(found) < count and found[-1] < config.total_steps:
        found.append(next_drain(config, found[-1]))
    return found


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, [LONGEST_RUN, 2 * LONGEST_RUN, 3 * LONGEST_RUN, 4 * LONGEST_RUN, 5 * LONGEST_RUN]),
        ({"totalSteps": 50}, [50]),
        ({"rebalance": {"everySteps": 20}}, [20, 40, 60, 80, 100]),
        ({"repack": {"enabled": True, "everySteps": 30}}, [30, 60, 90, 120, 150]),
        ({"checkpoint": {"path": "/tmp/c", "everySteps": 25}}, [25, 50, 75, 100, 125]),
        ({"checkpoint": {"everySteps": 25}, "totalSteps": 100}, [100]),
        (
            {"rebalance": {"everySteps": 20}, "checkpoint": {"path": "/tmp/c", "everySteps": 30}},
            [20, 30, 40, 60, 80],
        ),
        (
            {
                "dynamics": [
                    {"kind": "freezing", "startStep": 5, "endStep": 12, "everySteps": 5, "target": 0.5}
                ]
            },
            [5, 10, 12, 12 + LONGEST_RUN, 12 + 2 * LONGEST_RUN],
        ),
    ],
)
def test_it_drains_where_all_ranks_must_stand_at_one_step(fields, steps):
    """Rebalances, repacks and checkpoints in force, changes of layers, the end; else every 128 steps."""
    assert drains(fields) == steps


def test_with_a_flush_every_step_fills_and_drains():
    """What the predicted time of a step is made from."""
    fields = {**PLAIN, "rebalance": {"everySteps": 20}}
    flowing = {**fields, "pipeline": {"schedule": "PipeDream2BW"}}
    assert steps_between_drains(JobConfig.from_mapping(fields)) == 1
    assert steps_between_drains(JobConfig.from_mapping(flowing)) == 20
