"""Gangs that no single pool can hold, as policies see them: a configuration for each mixture of types."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import find_policy
from ballast_policies.configuration import Configuration
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.values import mixed_name


def with_mixtures(
    problem: Problem, mixed: Mapping[str, MixedGang], policy: str, *, agnostic: bool = False
) -> Problem:
    """``problem`` with configurations for the gangs of ``mixed`` that no single pool can hold.

    As it is under policies that take gangs of one type alone: such gangs have no share there, and run where
    GPUs are left.
    """
    large = {name: gang for name, gang in mixed.items() if not gang.fits_one_pool and gang.mixtures}
    if not large or agnostic or not find_policy(policy).takes_configurations:
        return problem
    jobs = (_mixture(job, large[job.name]) if job.name in large else job for job in problem.jobs)
    return dataclasses.replace(problem, jobs=tuple(jobs))


def _mixture(job: Job, gang: MixedGang) -> Job:
    # Where nothing is measured, the problem assumes other speeds than were estimated.
    fastest = max(gang.speeds, key=lambda gpu_type: gang.speeds[gpu_type])
    scale = job.throughput.get(fastest, 0.0) / gang.speeds[fastest] if gang.speeds[fastest] > 0 else 0.0
    found: dict[str, Configuration] = {}
    for parts in gang.mixtures:
        gpus: dict[str, int] = {}
        for part in parts:
            gpus[part.gpu_type] = gpus.get(part.gpu_type, 0) + part.gpus
        name, speed = mixed_name(parts), gang.speed(parts) * scale
        if name not in found or found[name].throughput < speed:
            found[name] = Configuration(name=name, gpus=gpus, throughput=speed)
    return dataclasses.replace(job, throughput={}, gpus=1, configurations=tuple(found.values()))
