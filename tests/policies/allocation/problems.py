"""Problems to solve: by hand, at random, and the standard ones that every policy meets."""

import numpy as np
from ballast_policies.allocation.problem import Entity, Job, Pair, Problem
from hypothesis import strategies as st


def problem(
    T, capacity, *, gpus=None, weights=None, steps=None, prices=None, elapsed=None, entities=None, **fields
):
    """Rows of T are jobs ``job-0``..., its columns the types ``type-0``...; every value may be left out."""
    types = tuple(f"type-{j}" for j in range(len(capacity)))
    extra = {key: fields.pop(key) for key in ("entity", "isolated", "deadline") if key in fields}
    names = {"entity": "entity", "isolated": "isolated_elapsed", "deadline": "deadline"}
    return Problem(
        gpu_types=types,
        capacity=dict(zip(types, capacity, strict=True)),
        prices=dict(zip(types, prices or [1.0] * len(types), strict=True)),
        entities=entities or {},
        jobs=tuple(
            Job(
                name=f"job-{m}",
                throughput=dict(zip(types, row, strict=True)),
                steps_remaining=100.0 * (m + 1) if steps is None else steps[m],
                elapsed=0.0 if elapsed is None else elapsed[m],
                gpus=1 if gpus is None else gpus[m],
                weight=1.0 if weights is None else weights[m],
                **{names[key]: values[m] for key, values in extra.items()},
            )
            for m, row in enumerate(T)
        ),
        **fields,
    )


def pair(a, b, *rates):
    """Jobs ``job-a`` and ``job-b`` together: one (first, second) for each type."""
    return Pair(
        jobs=(f"job-{a}", f"job-{b}"), throughput={f"type-{j}": tuple(rate) for j, rate in enumerate(rates)}
    )


def within_limits(instance, x):
    """No negative share, no job with more than all of its time, no type that gives more than it has."""
    assert (x >= 0).all()
    assert (instance.time_used(x) <= 1 + 1e-9).all()
    assert (instance.gpus_used(x) <= instance.capacity * (1 + 1e-9)).all()


@st.composite
def problems(draw, *, max_jobs=7, all_run=False, single=False):
    """Gangs, weights, types that a job cannot use, types without GPUs."""
    types, jobs = draw(st.integers(1, 4)), draw(st.integers(1, max_jobs))
    rate = st.floats(0.1, 20.0) if all_run else st.one_of(st.just(0.0), st.floats(0.1, 20.0))

    def values(each):
        return draw(st.lists(each, min_size=jobs, max_size=jobs))

    return problem(
        [draw(st.lists(rate, min_size=types, max_size=types)) for _ in range(jobs)],
        draw(st.lists(st.integers(1 if all_run else 0, 5), min_size=types, max_size=types)),
        gpus=values(st.just(1) if single else st.sampled_from([1, 2, 4])),
        weights=values(st.floats(0.2, 5.0)),
        steps=values(st.floats(10.0, 1e5)),
        elapsed=values(st.floats(0.0, 500.0)),
        isolated=values(st.floats(0.0, 500.0)),
        prices=draw(st.lists(st.floats(0.1, 5.0), min_size=types, max_size=types)),
    )


def random_problem(seed, jobs, types, *, gangs=(1, 2, 4), contention=2.0, entities=0, pairs=0.0, zero=0.1):
    """A random problem from a seed: rates over three decades, correlated over the types as GPUs' are."""
    draw = np.random.default_rng(seed)
    size = 10 ** draw.uniform(-1, 2, jobs)
    T = size[:, None] * np.sort(draw.uniform(1, 3, types)) * draw.uniform(0.5, 2.0, (jobs, types))
    T[draw.random((jobs, types)) < zero] = 0.0
    gpus = draw.choice(gangs, jobs)
    total = max(types, int(gpus.sum() / contention))
    capacity = np.maximum(max(gangs), draw.multinomial(total, np.full(types, 1 / types)))
    names = [f"team-{e}" for e in range(entities)]
    posed = problem(
        T.tolist(),
        capacity.tolist(),
        gpus=gpus.tolist(),
        weights=draw.choice([1.0, 2.0, 5.0], jobs).tolist(),
        steps=(size * 10 ** draw.uniform(3, 5, jobs)).tolist(),
        elapsed=draw.uniform(0, 4e4, jobs).tolist(),
        isolated=draw.uniform(0, 4e4, jobs).tolist(),
        prices=np.sort(draw.uniform(0.3, 4.0, types)).tolist(),
        entities={
            name: Entity(weight=float(e + 1), policy="fifo" if e % 2 else "fairness")
            for e, name in enumerate(names)
        },
        entity=[names[e] for e in draw.integers(0, entities, jobs)] if entities else [None] * jobs,
    )
    if not pairs:
        return posed
    together = []
    for a in range(jobs):
        for b in range(a + 1, jobs):
            if gpus[a] == gpus[b] and draw.random() < pairs:
                slow = draw.uniform(0.3, 0.95, (types, 2))
                together.append(pair(a, b, *(slow * T[[a, b]].T).tolist()))
    return Problem(
        **{field: getattr(posed, field) for field in ("gpu_types", "capacity", "jobs", "prices", "entities")},
        pairs=tuple(together),
    )


STANDARD = {
    "the dissertation's example": problem([[40, 10], [12, 4], [100, 50]], [1, 1]),
    "one job, one GPU": problem([[3.0]], [1]),
    "more GPUs than jobs": problem([[4, 1], [1, 4]], [5, 5]),
    "a gang that only just fits": problem([[4, 1], [1, 4]], [4, 1], gpus=[4, 1]),
    "a gang that fits nowhere": problem([[4, 1], [1, 4]], [2, 1], gpus=[4, 1]),
    "a job that runs nowhere": problem([[0, 0], [1, 4]], [2, 1]),
    "a type without GPUs": problem([[4, 1], [1, 4]], [0, 3]),
    "equal jobs": problem([[2, 1]] * 6, [2, 2]),
    "jobs bound to one type each": problem([[1, 0], [1, 0], [0, 1]], [1, 1]),
    "rates of very different size": problem([[1e-4, 3e-4], [5e3, 1e3], [1, 2]], [1, 1]),
    "nothing left to do": problem([[1, 2], [2, 1]], [1, 1], steps=[0.0, 0.0]),
    "sixty jobs, three types": random_problem(0, 60, 3),
    "fifty jobs, ten types, teams": random_problem(1, 50, 10, entities=4),
    "twenty jobs with pairs": random_problem(2, 20, 3, pairs=0.5),
}
"""What every policy must answer; each is named by what is special about it."""
