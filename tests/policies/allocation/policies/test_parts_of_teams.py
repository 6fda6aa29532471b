"""Part of the cluster that each job has a claim to through its team."""

import pytest
from ballast_policies.allocation.fairness.teams import parts
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.problem import Entity, Job, Problem, ProblemError


def parts_of(jobs, users=None, **entities):
    """``jobs``: name -> (team, weight); ``users``: job -> its user."""
    problem = Problem(
        gpu_types=("v100",),
        capacity={"v100": 8},
        jobs=tuple(
            Job(
                name=name,
                throughput={"v100": 1.0},
                entity=team,
                weight=weight,
                user=(users or {}).get(name, ""),
            )
            for name, (team, weight) in jobs.items()
        ),
        entities=entities,
    )
    return dict(zip(jobs, parts(instance(problem)).tolist(), strict=True))


def test_a_team_has_the_part_of_its_weight_and_its_jobs_share_it_by_theirs():
    """Jobs without a team stand beside the teams; teams without jobs have nothing."""
    found = parts_of(
        {"a": ("x", 1.0), "b": ("x", 3.0), "c": ("y", 5.0), "d": (None, 1.0)},
        x=Entity(weight=2.0),
        y=Entity(),
        idle=Entity(weight=9.0),
    )
    assert found == pytest.approx({"a": 0.125, "b": 0.375, "c": 0.25, "d": 0.25})


def test_teams_in_teams_divide_what_is_above_them():
    """A team of teams counts once."""
    found = parts_of(
        {"a": ("inner", 1.0), "b": ("inner", 1.0), "c": ("outer", 1.0), "d": ("other", 1.0)},
        outer=Entity(),
        inner=Entity(parent="outer"),
        other=Entity(),
    )
    assert found == pytest.approx({"a": 0.125, "b": 0.125, "c": 0.25, "d": 0.5})


def test_users_of_a_team_share_it_equally_however_many_jobs_they_have():
    """Then their jobs by weight, or the first first; those that name no user are one."""
    team, whose = "x", {"a1": "ann", "a2": "ann", "a3": "ann", "b": "bob"}
    jobs = {name: (team, 2.0 if name == "a1" else 1.0) for name in (*whose, "none", "nobody")}
    found = parts_of({**jobs, "in": ("inner", 1.0)}, whose, x=Entity(by_user=True), inner=Entity(parent="x"))
    want = {"a1": 1 / 8, "a2": 1 / 16, "a3": 1 / 16, "b": 1 / 4, "none": 1 / 8, "nobody": 1 / 8, "in": 1 / 4}
    assert found == pytest.approx(want)
    fifo = parts_of(jobs, whose, x=Entity(by_user=True, policy="fifo"))
    assert fifo["a1"] == pytest.approx(1 / 3, rel=2e-3) and fifo["b"] == pytest.approx(1 / 3, rel=2e-3)
    assert parts_of(jobs, whose, x=Entity())["b"] == pytest.approx(1 / 7)


def test_first_come_first_served_gives_the_first_nearly_all():
    """In a team that serves so; the parts are those of all jobs, and sum to 1, also of a thousand."""
    many = {f"j{i}": ("x", 1.0) for i in range(1000)}
    found = parts_of(many, x=Entity(policy="fifo"))
    assert found["j0"] > 0.99 and found["j0"] > found["j1"] > found["j2"]
    assert sum(found.values()) == pytest.approx(1.0)


def test_entities_in_thousands_of_entities_are_refused():
    """Policies go through them level by level; nothing that people name is so deep."""
    names = [f"e{level}" for level in range(3000)]
    parents = [None, *names[:-1]]
    entities = {name: Entity(parent=above) for name, above in zip(names, parents, strict=True)}
    with pytest.raises(ProblemError, match=r"entities\.e101\.parent: over 100 entities above it"):
        Problem(gpu_types=("t",), capacity={"t": 1}, jobs=(), entities=entities)
