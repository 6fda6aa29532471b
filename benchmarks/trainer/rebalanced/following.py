"""A training whose loads change, followed by the trainer's own rules: its profile, its looks, its decisions.

Each step that the profile wants is measured by layer, with noise where asked for; what is expected of the
layers says what the partition loses and where layers go.  A look is due one step after rank 0 has found it,
since the other ranks hear of it with the next step's sum.  After a move, measuring begins again.

This file is no benchmark itself.
"""

import dataclasses

import numpy as np
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.following.looking import CheckTimer, lost_seconds
from ballast_policies.planning.rebalance import decide_rebalance, least_gain
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_trainer.profiling.profile import Profile

MIN_GAIN = JobConfig.from_mapping({"totalSteps": 1, "model": {"name": "gpt", "layers": 1}}).rebalance.min_gain
"""The trainer's default."""
FEWEST_MEASURED = 3
PAUSE_SECONDS, DECIDE_SECONDS = 0.05, 0.01


class Medians(Profile):
    """Expects what was measured, however old."""

    def expected(self, *, coming=False):
        """The medians, whichever step is asked for."""
        return self.costs()


@dataclasses.dataclass(frozen=True)
class Followed:
    """The partition in force at each step, and how often was looked and moved."""

    partitions: list
    looks: int
    moves: int

    @property
    def overhead(self):
        """Seconds of all looks and moves."""
        return self.looks * DECIDE_SECONDS + self.moves * PAUSE_SECONDS


def follow(
    loads,
    start,
    microbatches,
    *,
    told=False,
    noise=0.0,
    seed=0,
    profile=Profile,
    min_gain=MIN_GAIN,
    weighs_noise=True,
):
    """Follow ``loads``, seconds a step, shape (steps, layers).

    Args:
        loads: of each step.
        start: the first partition.
        microbatches: of a step.
        told: whether the trainer knows the steps at which loads change, as of a schedule.
        noise: standard deviation of a measurement's logarithm.
        seed: of the noise.
        profile: how costs are expected.
        min_gain: as ``rebalance.minGain``.
        weighs_noise: whether a gain has to be more than noise may feign.
    """
    random, (steps, layers) = np.random.default_rng(seed), loads.shape
    known, waiting, partition, due = profile(layers), CheckTimer(), start, False
    partitions, looks, moves, lost, costs, least = [], 0, 0, 0.0, (), min_gain
    for step, row in enumerate(loads):
        if told and step and not np.array_equal(row, loads[step - 1]):
            known.forget()
        partitions.append(partition)
        if known.wants(step):
            # A layer's seconds, at the forward's place: decisions go by their sum.
            noisy = row * random.lognormal(0, noise, layers) if noise else row
            known.add([*noisy.tolist(), *[0.0] * 2 * layers], step=step)
            costs, lost = known.expected(coming=True).total, 0.0
            least = least_gain(min_gain, known.measured(), partition) if weighs_noise else min_gain
            if len(known) >= FEWEST_MEASURED:
                asked = BalancerInput(partition=partition, seconds=costs, microbatches=microbatches)
                lost = lost_seconds(asked, min_gain=least)
        looks_now, waiting = due, waiting.after_step(lost)
        # Before the first move, one is taken to cost a step.
        pause = PAUSE_SECONDS if moves else predict_step_seconds(partition.loads(costs), microbatches)
        due = waiting.is_over(pause + DECIDE_SECONDS)
        if looks_now:
            looks, due = looks + 1, False
            decision = decide_rebalance(
                BalancerInput(partition=partition, seconds=costs, microbatches=microbatches),
                min_gain=least_gain(min_gain, known.measured() if weighs_noise else (), partition),
                horizon_steps=steps - step,
                move_seconds=pause,
            )
            waiting, partition = waiting.after_look(moved=decision.rebalance), decision.partition
            if decision.rebalance:
                moves += 1
                known.forget()
                lost = 0.0
    return Followed(partitions, looks, moves)
