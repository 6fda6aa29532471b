"""The steps at which a pipeline without a flush drains, from the configuration."""

from ballast_policies.contract.job.job import JobConfig

from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.pipeline.layout import is_asynchronous

LONGEST_RUN = 128
"""Steps after which the pipeline drains anyway: a run is planned and checked as a whole before it starts."""

REBALANCE_EVERY = 20
"""Steps between two decisions to rebalance where the configuration leaves them open."""


def next_drain(config: JobConfig, step: int) -> int:
    """The step before which the pipeline that starts at ``step`` must be empty."""
    ends = [config.total_steps, step + LONGEST_RUN]
    intervals = []
    if config.rebalance.enabled:
        intervals.append(config.rebalance.every_steps or REBALANCE_EVERY)
    if config.repack.enabled:
        intervals.append(config.repack.every_steps)
    if config.checkpoint.path is not None:
        intervals.append(config.checkpoint.steps)
    if config.evaluation is not None:
        intervals.append(config.evaluation.every_steps)
    ends += [(step // interval + 1) * interval for interval in intervals]
    for change in map(ChangeSteps.of, config.dynamics):
        ends += [later for later in range(step + 1, min(ends)) if change.acts_at(later)][:1]
    return min(ends)


def steps_between_drains(config: JobConfig) -> int:
    """How many steps share one filling and draining of the pipeline; 1 with a flush."""
    return next_drain(config, 0) if is_asynchronous(config.pipeline.schedule) else 1
