"""Young gangs are left alone and moves are few, in the simulator as in the operator."""

import numpy as np
import pytest
from ballast_policies.simulator.settings import SettingsError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.simulations import job, simulated, simulation, table

TABLE = table({("job", gpus): {"fast": 2.0 * gpus, "slow": 1.0 * gpus} for gpus in (1, 2, 4)})


def a_job(gpus=1, *, steps=20_000.0, arrival=0.0):
    return job("job", steps, arrival, gpus)


def run(jobs, *, fast=1, slow=0, **options):
    options = {"round_seconds": 100.0, "record_timeline": True, **options}
    return simulated(jobs, {"fast": fast, "slow": slow}, TABLE, **options)


def stretches(result):
    """Seconds of each stretch that was not the end of its job."""
    last = {segment.row: segment.end for segment in result.timeline}
    return [s.end - s.start for s in result.timeline if s.end < last[s.row]]


@pytest.mark.slow
def test_without_hysteresis_two_jobs_take_turns_every_round():
    assert min(stretches(run([a_job(), a_job()]))) == pytest.approx(100.0)


@pytest.mark.slow
def test_a_gang_is_not_stopped_before_it_ran_min_run_seconds():
    """Turns of 350 s: to the end of the fourth round."""
    found = run([a_job(), a_job()], min_run_seconds=350.0)
    assert min(stretches(found)) == pytest.approx(400.0)


@pytest.mark.slow
@given(
    launch=st.integers(min_value=0, max_value=4_000).map(lambda tenths: tenths / 10),
    least=st.sampled_from([0.0, 30.0, 250.0]),
)
@examples(20)
def test_whatever_a_start_takes_gangs_that_take_turns_train_in_each_of_them(launch, least):
    """A turn ends at the first end of a round after the first step and what the gang may train at least."""
    jobs = [a_job(steps=20.0), a_job(steps=20.0), a_job(steps=20.0)]
    found = run(jobs, launch_seconds=launch, min_run_seconds=least)
    assert all(job.finish > 0 for job in found.jobs)
    assert all(seconds > launch and seconds >= launch + least for seconds in stretches(found))


@pytest.mark.slow
def test_no_more_gangs_are_stopped_or_moved_in_an_hour_than_allowed():
    """Six jobs on three GPUs that would change hands every round."""
    jobs = [a_job(steps=2e4) for _ in range(6)]
    found = run(jobs, fast=2, slow=1, max_moves_per_hour=2)
    ends = sorted(s.end for s in found.timeline if s.end < found.jobs[s.row].finish - 1e-6)
    for at in ends:
        assert sum(at <= other < at + 3600.0 for other in ends) <= 2
    assert len(ends) < len(stretches(run(jobs, fast=2, slow=1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waiting", "options", "longest"),
    [
        pytest.param(12, {"launch_seconds": 150.0}, 3000.0, id="each start of small ones outlasts a round"),
        pytest.param(12, {"min_run_seconds": 300.0}, 3000.0, id="what comes free is kept for it"),
        *((waiting, {}, 3 * max(1.0, waiting / 4) * 500.0) for waiting in (2, 12, 30)),
    ],
)
def test_no_large_gang_starves_in_a_queue_that_never_empties(waiting, options, longest):
    """It waits no longer than three times as long as the small jobs do, who come for as long as it waits."""
    assert wait_of_a_large_gang(waiting=waiting, **options) <= longest


def wait_of_a_large_gang(*, waiting, **options):
    """Seconds until a gang of 4 starts on 4 GPUs; single jobs of 500 s come as fast as they are done."""
    small = [a_job(steps=1000.0) for _ in range(waiting)]
    small += [a_job(steps=1000.0, arrival=125.0 * (i + 1)) for i in range(150)]
    jobs = sorted([*small, a_job(4, steps=8000.0, arrival=1.0)], key=lambda job: job.arrival)
    (large,) = (job for job in run(jobs, fast=4, **options).jobs if job.gpus == 4)
    return large.first_run - large.arrival


@pytest.mark.slow
@examples(15)
@given(
    gangs=st.lists(
        # Moments less than a microsecond apart are one to the operator, and an order to the arrays.
        st.tuples(
            st.sampled_from([1, 1, 2, 4]),
            st.floats(100, 5000),
            st.integers(0, 2_000_000).map(lambda milliseconds: milliseconds / 1000),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_the_operators_decisions_and_the_rounds_on_arrays_are_the_same(gangs):
    """The same run, to the microsecond within which moments are one; so it is with moves without end."""
    jobs = [a_job(gpus, steps=steps, arrival=at) for gpus, steps, at in sorted(gangs, key=lambda g: g[2])]
    plain = run(jobs, fast=4, slow=4)
    arrays = run(jobs, fast=4, slow=4, arrays=True)
    limited = run(jobs, fast=4, slow=4, max_moves_per_hour=10**6)
    for other in (limited, arrays):
        np.testing.assert_allclose(
            [one.finish for one in other.jobs], [one.finish for one in plain.jobs], rtol=1e-12, atol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"min_run_seconds": -1.0}, "min_run_seconds: -1 s"),
        ({"min_run_seconds": 60.0, "rules": "gavel"}, "min_run_seconds: 60 s"),
        ({"max_moves_per_hour": -1}, "max_moves_per_hour: -1"),
        ({"max_moves_per_hour": 3, "rules": "gavel"}, "max_moves_per_hour"),
        ({"max_moves_per_hour": 3, "space_sharing": True}, "space_sharing"),
    ],
)
def test_what_hysteresis_cannot_be_combined_with_is_named(options, word):
    """Gavel's rules, pairs, impossible values."""
    with pytest.raises(SettingsError, match=word):
        simulation(policy="max-min-fairness", **options)
