"""Tenant limits: who takes part in a decision, for small cases by hand and for any queue."""

from collections import Counter

import pytest
from ballast_policies.rounds.tenants import ALL_TYPES, LimitField, TenantJob, TenantLimit, admit_by_tenant
from hypothesis import given
from hypothesis import strategies as st


def waiting(name: str, *sizes: int, tenant: str = "a", held: int = 0) -> TenantJob:
    return TenantJob(name=name, tenants=(tenant,), sizes=sizes or (1,), held={ALL_TYPES: held})


def running(name: str, size: int, tenant: str = "a") -> TenantJob:
    held, there = {ALL_TYPES: size, "fast": size}, frozenset({"fast"})
    return TenantJob(name=name, tenants=(tenant,), sizes=(size,), runs_on=there, held=held)


def stated(**tenants: dict[str, int | None]) -> dict[TenantLimit, int]:
    """Limits by number: tenant -> field -> most."""
    return {
        TenantLimit(tenant, LimitField(field)): most
        for tenant, fields in tenants.items()
        for field, most in fields.items()
        if most is not None
    }


def admitted(*jobs: TenantJob, others=(), **limits: int):
    return admit_by_tenant(jobs, stated(a=limits, b=limits), others)


def kept_out(found) -> dict[str, LimitField]:
    return {name: limit.field for name, limit in found.over.items()}


def test_without_limits_all_take_part_with_their_largest_gang():
    """No tenant is named in the room for growth: there is no bound on it."""
    found = admitted(running("r", 2), waiting("w", 4, 2), waiting("x", 8, tenant="b"))
    assert found.sizes == {"r": 2, "w": 4, "x": 8} and not found.over and not found.room


def test_the_oldest_jobs_fill_the_limit_and_the_others_wait():
    """Each tenant by itself."""
    jobs = [waiting("a1", 2), waiting("b1", 2, tenant="b"), waiting("a2", 2), waiting("a3", 2)]
    found = admitted(*jobs, maxGpus=4)
    assert set(found.sizes) == {"a1", "a2", "b1"}
    assert kept_out(found) == {"a3": LimitField.GPUS} and found.room == {"a": 4, "b": 4}


def test_what_runs_comes_first_and_is_kept_when_the_limit_is_lowered():
    """Nothing is stopped for a limit; nothing new starts until there is room."""
    found = admitted(waiting("old", 1), running("r", 4), maxGpus=2)
    assert found.sizes == {"r": 4} and kept_out(found) == {"old": LimitField.GPUS}
    assert found.room["a"] == 0


def test_a_gang_takes_the_size_that_the_limit_leaves():
    """Eight would be best, four fit."""
    assert admitted(running("r", 4), waiting("w", 8, 4, 2), maxGpus=8).sizes["w"] == 4


def test_a_job_that_waits_for_the_limit_is_not_overtaken_by_younger_ones():
    """Small gangs would keep a large one waiting without end."""
    found = admitted(running("r", 4), waiting("large", 6), waiting("small", 1), maxGpus=8)
    assert kept_out(found) == {"large": LimitField.GPUS, "small": LimitField.GPUS}


def test_a_job_that_alone_exceeds_the_limit_keeps_no_other_waiting():
    found = admitted(waiting("huge", 16), waiting("small", 1), maxGpus=8)
    assert found.over.keys() == {"huge"} and found.sizes == {"small": 1}


def test_gpus_of_a_launch_that_ends_count_until_its_pods_are_gone():
    """For the other jobs of the tenant; the job itself is launched after them."""
    jobs = waiting("stopping", 4, held=4), waiting("next", 1)
    found = admitted(*jobs, maxGpus=4)
    assert found.sizes == {"stopping": 4} and kept_out(found) == {"next": LimitField.GPUS}
    assert admitted(waiting("w", 4, 2), others=[waiting("saves", held=2)], maxGpus=4).sizes == {"w": 2}
    assert admitted(*jobs, maxGpus=5).sizes == {"stopping": 4, "next": 1}


def test_running_jobs_are_counted():
    """One runs, one more may."""
    found = admitted(running("r", 1), waiting("w"), waiting("x"), maxRunningJobs=2)
    assert set(found.sizes) == {"r", "w"} and kept_out(found) == {"x": LimitField.RUNNING_JOBS}


def test_the_oldest_waiting_jobs_are_considered():
    """Those that run do not count; another tenant's queue is its own."""
    jobs = [running("r", 1), *(waiting(f"w{number}") for number in range(5)), waiting("b", tenant="b")]
    found = admitted(*jobs, maxWaitingJobs=2)
    assert set(found.sizes) == {"r", "w0", "w1", "b"}
    assert set(kept_out(found).values()) == {LimitField.WAITING_JOBS}


NUMBERS = ("maxGpus", "maxRunningJobs", "maxWaitingJobs")
limits = st.fixed_dictionaries(dict.fromkeys(NUMBERS, st.none() | st.integers(0, 6)))


@st.composite
def queues(draw):
    jobs = []
    for number in range(draw(st.integers(0, 12))):
        sizes = tuple(sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)), reverse=True))
        name, tenant = f"j{number}", draw(st.sampled_from("ab"))
        if draw(st.booleans()):
            jobs.append(running(name, sizes[0], tenant))
        else:
            jobs.append(waiting(name, *sizes, tenant=tenant, held=draw(st.sampled_from([0, 0, sizes[0]]))))
    return jobs


@given(jobs=queues(), a=limits, b=limits)
def test_limits_hold_for_any_queue_of_jobs(jobs, a, b):
    """Every job is either in or out; what runs is in; no limit is exceeded but by what ran already; who is
    out finds no room, or waits behind one that finds none; one tenant's jobs never change another's."""
    by_tenant = {"a": a, "b": b}
    found = admit_by_tenant(jobs, stated(**by_tenant))
    assert found.sizes.keys() | found.over.keys() == {job.name for job in jobs}
    assert not found.sizes.keys() & found.over.keys()
    gpus, count, queue, held = Counter(), Counter(), Counter(), Counter()
    started = Counter()
    for job in jobs:
        (tenant,), has = job.tenants, job.held[ALL_TYPES]
        if job.runs_on:
            assert found.sizes[job.name] == job.sizes[0]
        elif job.name in found.sizes:
            assert found.sizes[job.name] in job.sizes
            queue[tenant] += 1
            started[tenant] += max(found.sizes[job.name], has)
        gpus[tenant] += max(found.sizes.get(job.name, 0), has)
        count[tenant] += job.name in found.sizes
        held[tenant] += has
    for tenant in gpus:
        most_gpus, most_running, most_waiting = (by_tenant[tenant][name] for name in NUMBERS)
        if most_gpus is not None:
            assert found.room[tenant] == max(0, most_gpus - gpus[tenant]) + started[tenant]
            assert gpus[tenant] <= max(most_gpus, held[tenant])
        assert most_waiting is None or queue[tenant] <= most_waiting
        waits = False
        for job in (job for job in jobs if job.tenants == (tenant,) and job.name in found.over):
            field, least = found.over[job.name].field, job.sizes[-1]
            if field is LimitField.GPUS and least <= most_gpus:
                waits = waits or gpus[tenant] - job.held[ALL_TYPES] + least > most_gpus
                assert waits
            assert field is not LimitField.RUNNING_JOBS or count[tenant] >= most_running
            assert field is not LimitField.WAITING_JOBS or queue[tenant] == most_waiting
        if most_running is not None and started[tenant]:
            assert count[tenant] <= most_running
    alone = admit_by_tenant([job for job in jobs if job.tenants == ("a",)], stated(**by_tenant))
    assert alone.sizes == {
        job.name: found.sizes[job.name] for job in jobs if job.tenants == ("a",) and job.name in found.sizes
    }


def typed(name, *sizes, types=("fast", "slow"), runs_on="", held=0, tenants=("a",)) -> TenantJob:
    return TenantJob(
        name=name,
        tenants=tenants,
        sizes=sizes[::-1],
        grown=sizes,
        types=types,
        held={runs_on: held} if runs_on else {},
        runs_on=frozenset({runs_on} - {""}),
    )


def by_types(gangs, limits, others=None):
    """Gang -> type -> GPUs, and gang -> tenant that leaves it no type; ``others``: tenant -> type -> held."""
    most = {
        TenantLimit(tenant, LimitField.GPUS_BY_TYPE, gpu_type): gpus
        for tenant, by_type in limits.items()
        for gpu_type, gpus in by_type.items()
    }
    holding = [
        TenantJob(name="other", tenants=(tenant,), held=held) for tenant, held in (others or {}).items()
    ]
    found = admit_by_tenant(gangs, most, holding)
    return found.by_type, {name: limit.tenant for name, limit in found.over.items()}


def test_a_gang_gets_the_types_that_its_tenant_has_room_in():
    """The oldest waiting one the scarce type, the others the rest; what runs stays where it is."""
    gangs = [typed("r", 4, runs_on="slow", held=4), typed("one", 2), typed("two", 4)]
    found, _ = by_types(gangs, {"a": {"fast": 4}}, {"a": {"fast": 1}})
    assert found == {"r": {"slow": 4}, "one": {"fast": 2, "slow": 2}, "two": {"slow": 4}}


def test_a_gang_that_waits_for_a_type_is_not_overtaken_by_younger_ones():
    """One that alone exceeds the limit keeps nobody waiting."""
    fast = ("fast",)
    gangs = [typed("huge", 9, types=fast), typed("wide", 6, types=fast), typed("small", 1, types=fast)]
    found, without = by_types(gangs, {"a": {"fast": 8}}, {"a": {"fast": 4}})
    assert not found and without == dict.fromkeys(("huge", "wide", "small"), "a")
    assert by_types(gangs[::2], {"a": {"fast": 8}}, {"a": {"fast": 4}})[0]["small"] == {"fast": 1}


def test_a_gang_is_within_the_limits_of_each_of_its_tenants():
    """What one of them refuses takes no room of the others, and nobody's turn but that tenant's."""
    fast = {"types": ("fast",)}
    gangs = [
        typed("full", 3, **fast, tenants=("a", "team")),
        typed("fits", 2, **fast, tenants=("a", "team")),
        typed("beside", 4, **fast, tenants=("a",)),
    ]
    found, without = by_types(gangs, {"a": {"fast": 6}, "team": {"fast": 2}})
    assert found == {"fits": {"fast": 2}, "beside": {"fast": 4}}
    assert without == {"full": "team"}
    found, _ = by_types(gangs, {"a": {"fast": 6}, "team": {"fast": 3}}, {"team": {"fast": 1}})
    assert found == {"beside": {"fast": 4}}


@pytest.mark.parametrize(
    ("field", "most"),
    [(LimitField.GPUS, 6), (LimitField.RUNNING_JOBS, 1), (LimitField.WAITING_JOBS, 1)],
    ids=["maxGpus", "maxRunningJobs", "maxWaitingJobs"],
)
def test_a_gang_that_finds_no_type_takes_no_room_of_the_other_limits(field, most):
    """It takes no part, so the younger ones have what it would have had."""
    limits = {TenantLimit("a", LimitField.GPUS_BY_TYPE, "fast"): 2, TenantLimit("a", field): most}
    found = admit_by_tenant([typed("never", 4, types=("fast",)), typed("small", 4, types=("slow",))], limits)
    assert found.sizes == {"small": 4} and kept_out(found) == {"never": LimitField.GPUS_BY_TYPE}


@given(st.data())
def test_no_choice_of_types_and_sizes_exceeds_a_limit_by_type(data):
    """Whatever each gang is given of what it may have, and unless more was held before."""
    types = ("fast", "slow", "old")
    limits = {
        tenant: data.draw(st.dictionaries(st.sampled_from(types), st.integers(0, 12))) for tenant in "ab"
    }
    others = {
        tenant: data.draw(st.dictionaries(st.sampled_from(types), st.integers(0, 3))) for tenant in "ab"
    }
    gangs = []
    for number in range(data.draw(st.integers(0, 6))):
        sizes = sorted(data.draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
        may = tuple(sorted(data.draw(st.sets(st.sampled_from(types), min_size=1))))
        runs_on = data.draw(st.sampled_from(("", *may)))
        held = data.draw(st.sampled_from(sizes)) if runs_on else 0
        whose = data.draw(st.sampled_from((("a",), ("b",), ("a", "b"))))
        gangs.append(typed(f"j{number}", *sizes, types=may, runs_on=runs_on, held=held, tenants=whose))
    found, without = by_types(gangs, limits, others)
    assert without.keys() | found.keys() == {gang.name for gang in gangs}
    for tenant, by_type in limits.items():
        own = [gang for gang in gangs if tenant in gang.tenants]
        for gpu_type, limit in by_type.items():
            before = others[tenant].get(gpu_type, 0) + sum(gang.held.get(gpu_type, 0) for gang in own)
            after = others[tenant].get(gpu_type, 0)
            for gang in own:
                least = gang.held.get(gpu_type, 0) if gpu_type in gang.runs_on else 0
                after += max(least, found.get(gang.name, {}).get(gpu_type, 0))
            assert after <= max(limit, before)
    for gang in gangs:
        types_of_it = found.get(gang.name, {})
        if any(limits[tenant] for tenant in gang.tenants):
            assert gang.runs_on <= types_of_it.keys() <= set(gang.types)
            assert all(types_of_it[kind] >= gang.held[kind] for kind in gang.runs_on)
        assert all(gang.least <= most <= gang.grown[-1] for most in types_of_it.values())
