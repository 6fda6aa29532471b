"""Hostile TrainingJobs: what their author, another controller or a trainer may write."""

from ballast_policies.contract import JOB_LABEL, LAUNCH_LABEL, RANK_LABEL, pod_name

from tests.chaos.hostile.author import AMOUNTS, TIMES, Author, Hostile, kind
from tests.chaos.hostile.jobs import NAMESPACE, POOL_LABEL
from tests.chaos.processes import hostile as specs
from tests.operator.loops.hostile.test_lies import LIES


@kind("TrainingJob with a hostile spec")
def _(author: Author, number: int) -> Hostile:
    name, spec = author.rng.choice(sorted(specs.SPECS.items()))
    return author.job(f"TrainingJob with a hostile spec: {name}", number, spec=spec)


@kind("TrainingJob with a hostile name")
def _(author: Author, number: int) -> Hostile:
    victim = author.victim()
    names = ("ballast-operator", f"{victim}-1", f"{victim}-trainer", f"x{number}", "h" * 63, "a.b", "Upper")
    return author.job("TrainingJob with a hostile name", number, name=author.rng.choice(names))


@kind("TrainingJob with others' metadata")
def _(author: Author, number: int) -> Hostile:
    metadata = {
        "annotations": author.annotations(),
        "labels": {JOB_LABEL: author.victim(), LAUNCH_LABEL: "1", RANK_LABEL: "0", POOL_LABEL: "fast"},
        "finalizers": ["example.com/never", "kopf.zalando.org/KopfFinalizerMarker"],
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Namespace", "name": NAMESPACE, "uid": "2-2-2", "controller": False}
        ],
    }
    chosen = author.rng.sample(sorted(metadata), 2)
    return author.job(
        "TrainingJob with others' metadata", number, metadata={name: metadata[name] for name in chosen}
    )


@kind("TrainingJob whose status a stranger writes")
def _(author: Author, number: int) -> Hostile:
    rng, victim = author.rng, author.victim()
    allocation = {
        "gpuType": rng.choice(["fast", "", "none"]),
        "pool": rng.choice(["fast", "slow", "none"]),
        "gpus": rng.choice([0, 1, 2**31, 2**53]),
        "gpusPerPod": rng.choice([1, 1024]),
        "pods": rng.choice([[pod_name(victim, 1, 0)], [pod_name(f"hostile-{number}", 1, 0)] * 2, [""], []]),
        "nodes": rng.choice([["fast-0"], ["none"], ["fast/new-0"], ["fast-0", "fast-0"]]),
        "launch": rng.choice([1, 2**53]),
        "since": rng.choice(TIMES),
    }
    amount = rng.choice(AMOUNTS)
    status = {
        "allocation": allocation,
        "launches": rng.choice([0, 1, 2**53]),
        "costSoFar": amount,
        "costAt": rng.choice(TIMES),
        "poolCosts": [{"pool": "fast", "cost": amount, "gpuSeconds": amount}],
        "teamCosts": [{"team": "x", "cost": amount}],
        "lostCost": amount,
        "suspendedSeconds": amount,
        "suspendedSince": rng.choice(TIMES),
        "nextLaunchAt": rng.choice(TIMES[:1]),
        "isolated": {"seconds": amount, "step": 2**53},
        "progress": {"step": rng.choice([0, 2**53]), "stepsPerSecond": amount},
        "restarts": {"Failed": rng.choice([0, 2**31])},
        "conditions": [
            {
                "type": rng.choice(["Admitted", "Running", "x"]),
                "status": rng.choice(["True", "False", "Unknown"]),
                "reason": rng.choice(["Assigned", "x" * 200]),
                "message": rng.choice(["", "y" * 4096]),
                "lastTransitionTime": rng.choice(TIMES),
            }
        ],
    }
    chosen = rng.sample(sorted(status), rng.randint(1, 5))
    return author.job(
        "TrainingJob whose status a stranger writes", number, status={name: status[name] for name in chosen}
    )


@kind("TrainingJob whose reports lie")
def _(author: Author, number: int) -> Hostile:
    chosen = author.rng.sample(sorted(LIES.values()), 2)
    return author.job("TrainingJob whose reports lie", number, lies=dict(chosen))


@kind("TrainingJob whose names are taken")
def _(author: Author, number: int) -> Hostile:
    """What takes them is made before it: see :func:`..other_kinds.in_the_way`."""
    return author.job("TrainingJob whose names are taken", number)
