"""Costs on their way: decisions go by where they lead, and a move is judged by the same."""

import math

import numpy as np
import pytest
from ballast_policies.planning.launch import partition_of
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.rebalance_monitor import RebalanceMonitor
from ballast_trainer.profiling.profile import Profile

from tests.trainer.loop.test_rebalance import LAYERS, add_step, decided, job, monitor_of, run_of


def follow(profile, layers_at, steps):
    """Measure the steps that the profile wants."""
    for step in steps:
        if profile.wants(step):
            add_step(profile, layers_at(step), step=step)


def test_costs_that_fall_slowly_are_known_as_they_are_now():
    """One step in eight is measured by then: the median is as old as the middle of 56 steps."""
    profile = Profile(2)

    def layers_at(step):
        return (10.0, 10.0 - step / 50)

    follow(profile, layers_at, range(121))
    now = layers_at(120)
    assert profile.costs().total[1] > 1.05 * now[1]
    assert profile.expected().total == pytest.approx(now, rel=0.02)
    coming = profile.expected(coming=True)
    assert coming.total[0] == 10.0 and coming.total[1] < now[1]
    assert coming.forward[1] == pytest.approx(coming.total[1] / 3)
    profile.forget()
    assert profile.expected() is None


def test_costs_that_do_not_change_are_the_median():
    """Also the disturbed step of a noisy one."""
    profile = Profile(2)
    for step, second in enumerate([4.0, 4.2, 3.9, 50.0, 4.1, 3.8, 4.0, 4.1]):
        add_step(profile, (4.0, second), step=step)
    assert profile.expected() == profile.expected(coming=True) == profile.costs()


def test_layers_move_before_costs_on_their_way_have_arrived():
    """The last layers get cheaper in every step: what they cost when it was measured would leave them."""
    training = job((0, 4, 8), minGain=0.05)
    training.profile.forget()
    for step in range(8):
        falling = 0.3 - 0.01 * step
        add_step(training.profile, [0.3] * 4 + [falling] * 4, step=step)
    costs = training.profile.costs()
    decision = decided(training, steps_left=992)
    assert decision.partition.bounds == (0, 3, 8)
    monitor = monitor_of(training, 1)
    while not monitor.due():
        monitor.step_done()
    # A profile that stays at the measured median moves nothing.
    training.profile.forget()
    for step in range(8):
        add_step(training.profile, costs.total, step=step)
    assert not decided(training).rebalance


@pytest.mark.slow
@pytest.mark.parametrize("change", [-0.005, 0.005], ids=["cheaper", "dearer"])
@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_a_move_is_judged_by_what_its_layers_cost_by_then(change, slower):
    """Taken back where steps take longer than that explains, and not for costs that change."""
    training = job((0, 4, 8), minGain=0.02)
    run = run_of(training)
    progress = Progress(training, run)
    monitor = RebalanceMonitor(progress)
    training.profile.forget()

    def layers_at(step):
        return [0.8 + change * step] * LAYERS

    def train(steps, factor):
        for step in steps:
            if training.profile.wants(step):
                add_step(training.profile, layers_at(step), step=step)
            loads = partition_of(training.stages).loads(layers_at(step))
            run.step = step + 1
            progress.step_done(1.0, factor * (3 / 4 * loads.max() + loads.sum() / 4), -math.inf)

    train(range(64), 1.0)
    before = training.stages
    monitor.checked(moved_from=before, measured=progress.step_seconds())
    progress.rebalanced(0.0, 10.0)
    training.profile.forget()
    train(range(64, 72), slower)
    assert monitor.reverts_to() == (before if slower > 1 else None)


def test_layers_that_only_seem_uneven_stay():
    """Noisy measurements whose medians differ: the same medians without noise move a layer."""
    random, costs = np.random.default_rng(3), np.array([0.3, 0.3, 0.3, 0.05, 0.05, 0.3, 0.3, 0.3])
    training = job((0, 4, 8), minGain=0.02)
    training.profile.forget()
    for step in range(8):
        add_step(training.profile, costs * random.lognormal(0, 0.15, LAYERS), step=step)
    medians = training.profile.costs().total
    assert not decided(training).rebalance
    assert not monitor_of(training, 100).due()
    training.profile.forget()
    for step in range(8):
        add_step(training.profile, medians, step=step)
    decision = decided(training)
    assert decision.rebalance
    gain = 1 - decision.step_seconds_after / decision.step_seconds_before
    assert 0.02 < gain < 0.1


def test_the_profile_follows_costs_that_change_at_no_known_step():
    """Two measured steps that agree replace the older ones, and the next steps are measured; one is noise."""
    profile = Profile(3)
    for step in range(8):
        assert profile.wants(step)
        add_step(profile, (4.0, 4.0 + 0.1 * (step % 3), 4.0))
    assert not profile.wants(9) and profile.wants(16)
    add_step(profile, (4.0, 4.0, 9.0))
    assert profile.wants(17), "a step that differs is followed by another look"
    add_step(profile, (4.0, 4.0, 4.1))
    assert not profile.wants(18)
    assert profile.costs().total[2] == pytest.approx(4.0)
    add_step(profile, (4.0, 2.0, 4.0))
    add_step(profile, (4.0, 2.1, 4.0))
    assert profile.costs().total == pytest.approx((4.0, 2.05, 4.0))
    assert len(profile) == 2 and profile.wants(19)
    profile.follows = False
    for _ in range(8):
        add_step(profile, (4.0, 2.1, 4.0))
    add_step(profile, (4.0, 9.0, 4.0))
    assert not profile.wants(33), "on one rank no layer can move"
    assert profile.wants(40)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_is_not_taken_for_change(noise):
    """Few more steps than one in eight are measured, and a layer that takes twice as long is seen at once."""
    draw, profile, measured = np.random.default_rng(0), Profile(12), 0
    for step in range(400):
        if not profile.wants(step):
            continue
        measured += step >= 50
        profile.add(list(draw.normal(1, noise, 36).clip(0)), step=step)
    assert measured < 0.3 * 350
    for step in range(400, 410):
        if profile.wants(step):
            profile.add([*np.where(np.arange(36) % 12 == 3, 2.0, 1.0)], step=step)
    assert profile.costs().total[3] > 5
