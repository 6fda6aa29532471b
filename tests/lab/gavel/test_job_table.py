"""The order of job types with which Gavel's published curves were drawn."""

import itertools

import pytest
from ballast_lab.gavel.job_table import PUBLISHED
from ballast_policies.simulator.workloads import continuous, static
from ballast_policies.throughput.table import built_in_table


def first(workload, count):
    return list(itertools.islice(workload.jobs, count))


def test_the_published_job_table_gives_the_longest_jobs_of_the_published_makespan():
    """Published: 161.164 h for 100 to 300 jobs, seeds 0 to 2, the mean of the three longest jobs."""
    table = built_in_table()
    for count in (100, 300):
        longest = []
        for seed in range(3):
            jobs = first(static(table, count=count, seed=seed, job_table=PUBLISHED), count)
            fastest = (max(table.alone(job.type, kind) for kind in table.gpu_types) for job in jobs)
            longest.append(max(job.steps / rate / 3600 for job, rate in zip(jobs, fastest, strict=True)))
        assert sum(longest) / 3 == pytest.approx(161.164, abs=0.001)


def test_job_tables_share_durations_on_one_gpu_and_differ_in_types():
    """Only which model a job trains changes."""
    table = built_in_table()
    now = first(continuous(table, jobs_per_hour=4.0, seed=0, several_gpus=False), 200)
    then = first(continuous(table, jobs_per_hour=4.0, seed=0, several_gpus=False, job_table=PUBLISHED), 200)
    durations = [[job.steps / table.alone(job.type, "v100") for job in jobs] for jobs in (now, then)]
    assert durations[0] == pytest.approx(durations[1])
    assert [job.type for job in now] != [job.type for job in then]
