"""Random rounds in a row, with every kind of gang, node and limit: what holds of each of them."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.planning.launch import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.rounds.decide import LEAST_GAIN, decide_round
from ballast_policies.rounds.gangs import (
    ElasticGang,
    MixedGang,
    SharedGpus,
    SharingJob,
    SpreadGang,
)
from ballast_policies.rounds.ledger import given_to_tenants, in_its_pools, in_whole_pods, pack
from ballast_policies.rounds.question import Question, SpotLimits
from ballast_policies.rounds.spot_limits import launches, nodes_by_place
from ballast_policies.rounds.values import (
    Node,
    NodeRequest,
    RoundSettings,
    RoundState,
    TopologyRequest,
    domains_of,
    stays,
)
from ballast_policies.throughput.estimator import PairSpeeds
from hypothesis import example, given
from hypothesis import strategies as st

TYPES = {"p": "v100", "q": "k80", "r": "v100"}
PIPELINE = LaunchedPipeline(
    layers=MeasuredLayers(), count=24, form=PipelineForm(schedule="1F1B", positions=1, microbatches=8)
)
KINDS = ("taints", "pods", "racks", "elastic", "mixed", "shared", "spot", "spread", "losses", "tenants")
REQUESTS = (
    TopologyRequest("block", 0, required=True),
    TopologyRequest("rack", 1, required=True),
    TopologyRequest("rack", 1, required=False),
)
GB = 1e9


def random_nodes(rng, kinds):
    found = []
    for pool, gpu_type in TYPES.items():
        for number in range(rng.randint(1, 3)):
            name = f"{pool}{number}"
            labels = {"block": rng.choice(("", "1", "2")), "rack": rng.choice(("", "1", "2"))}
            found.append(
                Node(
                    name=name,
                    pool=pool,
                    gpu_type=gpu_type,
                    gpus=rng.randint(0, 6)
                    if "shared" not in kinds
                    else 1
                    if pool == "r"
                    else rng.randint(0, 2),
                    taints=rng.choice(("", "", "x", "y")) if "taints" in kinds else "",
                    provisionable="mixed" in kinds and rng.random() < 0.2,
                    zone=rng.choice(("", "1", "2")) if "spot" in kinds else "",
                    domains=domains_of(name, labels, ("block", "rack")) if "racks" in kinds else (),
                )
            )
    return found


def random_question(rng, kinds):
    """Without what runs: nodes, jobs, and all that they ask for."""
    nodes, jobs, elastic, mixed = random_nodes(rng, kinds), [], {}, {}
    asks, sharing = {}, {}
    most = max(sum(node.gpus for node in nodes if node.pool == pool) for pool in TYPES)
    for number in range(rng.randint(2, 9)):
        name, each = f"j{number}", rng.choice((1, 1, 2, 3)) if "pods" in kinds else 1
        gpus = each * rng.choice((1, 1, 1, 2) if "shared" in kinds else (1, 1, 2, 2, 3, 4))
        rates = {kind: rng.choice((0.0, 1.0, 1.0, 3.0, 4.0)) for kind in ("v100", "k80")}
        sizes = range(gpus, gpus + each * rng.randint(1, 5), each)
        may = {flag: rng.random() < 0.8 for flag in ("may_move", "may_shrink", "may_grow")}
        barred = frozenset(rng.sample("xy", rng.randint(0, 2))) if "taints" in kinds else frozenset()
        domain = rng.choice(REQUESTS) if "racks" in kinds and rng.random() < 0.5 else None
        asks[name] = NodeRequest(barred, each, domain)
        if "elastic" in kinds and rng.random() < 0.7 and len(sizes) > 1 and any(rates.values()):
            speeds = itertools.accumulate(rng.uniform(0.1, 1.0) for _ in range(sizes[-1]))
            table = dict(enumerate(speeds, start=1))
            elastic[name] = ElasticGang(
                speeds={kind: {n: rate * table[n] for n in sizes} for kind, rate in rates.items() if rate},
                together=each,
                per_pod=each,
                restart_seconds=rng.choice((1.0, 40.0)),
                live="planned" not in kinds or rng.random() < 0.4,
                live_sizes=tuple(n for n in sizes if rng.random() < 0.4) if "planned" in kinds else (),
                **may,
            )
            rates = {kind: rate * table[gpus] for kind, rate in rates.items()}
        elif "mixed" in kinds and rng.random() < 0.7 and max(rates.values()) > 0:
            gpus = gpus if rng.random() < 0.7 else each * rng.randint(2, 8)
            mixed[name] = MixedGang(
                pipeline=PIPELINE,
                sizes=tuple(range(gpus, gpus + each * rng.randint(1, 4), each)),
                speeds=rates,
                base=gpus,
                fits_one_pool=gpus <= most,
                barred=barred,
                per_pod=each,
                **may,
            )
        if "shared" in kinds and gpus == 1 and rng.random() < 0.8:
            known = frozenset(kind for kind in rates if rng.random() < 0.9)
            memory = rng.choice((5, 10, 20)) * GB
            sharing[name] = SharingJob(kind=rng.choice("uvw"), memory=memory, known_alone=known)
        weight, steps = rng.choice((1.0, 1.0, 3.0)), rng.choice((None, 1e2, 1e4, 1e6))
        jobs.append(Job(name=name, gpus=gpus, throughput=rates, weight=weight, steps_remaining=steps))
    pairs = {(a, b): rng.uniform(0.2, 1.0) for a in "uvw" for b in "uvw" if rng.random() < 0.5}
    return Question(
        now=0.0,
        shares={},
        jobs=jobs,
        nodes=nodes,
        elastic=elastic,
        mixed=mixed,
        shared=SharedGpus(
            jobs=sharing,
            memory={n.name: rng.choice((16, 32)) * GB for n in nodes if n.pool == "r"} if sharing else {},
            speeds=PairSpeeds({"v100": pairs} if pairs else {}),
        ),
        spot=SpotLimits(
            pools=frozenset("pr"),
            on_demand_share=rng.choice((0.0, 0.05, 0.25, 0.5, 0.9, 1.0)),
            most_in_one_pool=rng.choice((0.1, 0.34, 0.5, 0.75, 1.0)),
        )
        if "spot" in kinds
        else SpotLimits(),
        surplus=rng.choice(list(Surplus)),
        asks=asks,
    )


def spread_gangs(rng, running):
    """Of some that run on several nodes."""
    return {
        name: SpreadGang(
            at=at,
            fewest=rng.randint(1, 2),
            speed=rng.uniform(0.5, 4.0),
            packed_speed=rng.uniform(0.5, 4.0),
            may_move=rng.random() < 0.8,
        )
        for name, at in running.items()
        if len(set(at.nodes)) > 1 and not at.parts
    }


def with_other_taints(rng, question, running):
    """Some nodes are closed, some jobs tolerate less or more than before; what runs there stays."""
    held = Counter(node for at in running.values() for node in at.nodes)
    nodes = [
        dataclasses.replace(node, closed="cordoned", gpus=min(node.gpus, held[node.name]))
        if rng.random() < 0.1
        else node
        for node in question.nodes
    ]
    asks = {
        name: dataclasses.replace(asked, barred=frozenset(rng.sample("xy", rng.randint(0, 2))))
        for name, asked in question.asks.items()
        if rng.random() < 0.2 and name not in question.mixed
    }
    return dataclasses.replace(question, nodes=nodes, asks={**question.asks, **asks})


def with_losses(rng, question):
    """Some nodes are gone, others have lost GPUs, and some jobs cannot use a type any more."""
    nodes = [
        dataclasses.replace(node, gpus=rng.randint(0, node.gpus)) if rng.random() < 0.15 else node
        for node in question.nodes
        if rng.random() < 0.9
    ]
    jobs = [
        dataclasses.replace(job, throughput={**job.throughput, rng.choice(("v100", "k80")): 0.0})
        if rng.random() < 0.1 and job.name not in {*question.elastic, *question.mixed}
        else job
        for job in question.jobs
    ]
    return dataclasses.replace(question, nodes=nodes, jobs=jobs)


def played(rng, kinds, rounds=6):
    """(question, decision), each from what the one before has left; jobs end, and come again."""
    every = random_question(rng, kinds)
    state, now, held_back = RoundState(), 1000.0, frozenset[str]()
    least_run, limit = rng.choice((0.0, 0.0, 200.0, 700.0)), rng.choice((None, None, 0, 1, 2, 4))
    for _ in range(rounds):
        there = {job.name: job for job in every.jobs if rng.random() < 0.9}
        running = {name: at for name, at in state.running.items() if name in there}
        for name in running.keys() & every.mixed.keys():
            there[name] = dataclasses.replace(there[name], gpus=len(running[name].nodes))
        held = Counter(f"t{name[-1] in '02468'}" for name in there)
        settings = RoundSettings(
            round_seconds=100.0,
            min_run_seconds=least_run,
            max_moves_per_hour=limit,
            within_round=rng.random() < 0.3,
        )
        here = with_other_taints(rng, every, running) if "taints" in kinds else every
        question = dataclasses.replace(
            here,
            now=now,
            jobs=list(there.values()),
            shares={
                name: {kind: rng.choice((0.0, rng.random())) for kind in ("v100", "k80")} for name in there
            },
            state=dataclasses.replace(state, running=running),
            settings=settings,
            elastic={name: gang for name, gang in every.elastic.items() if name in there},
            mixed={name: gang for name, gang in every.mixed.items() if name in there},
            spread=spread_gangs(rng, running) if "spread" in kinds else {},
            tenants={name: f"t{name[-1] in '02468'}" for name in there} if "tenants" in kinds else {},
            room={tenant: rng.randint(4, 12) for tenant in held} if "tenants" in kinds else {},
            pending=held_back & running.keys() if settings.within_round else frozenset(),
        )
        question = with_losses(rng, question) if "losses" in kinds else question
        decided = decide_round(question)
        yield question, decided
        kept = {*decided.extended, *decided.resized}
        disturbed = len(decided.moved) + len(decided.stopped)
        state = RoundState(
            received={
                name: {kind: rng.uniform(0, 500) for kind in ("v100", "k80")} for name in decided.placements
            },
            running=decided.placements,
            running_since={
                name: state.running_since[name] if name in kept else now for name in decided.placements
            },
            moves=(*state.moves, *([now] * disturbed)),
        )
        held_back = frozenset(name for name in decided.started if rng.random() < 0.3)
        now += rng.choice((10.0, 100.0, 600.0, 3700.0))


def nodes_hold_what_is_given(question, decided):
    """No GPU twice, but for two jobs that share it, agree, fit, and do more than by turns."""
    used = Counter(node for at in decided.placements.values() for node in at.nodes)
    for node in question.nodes:
        if used[node.name] <= node.gpus:
            continue
        one, other = (name for name, at in decided.placements.items() if node.name in at.nodes)
        assert question.shared.fit(one, other, node.name)
        assert {decided.colocations[one].partner, decided.colocations[other].partner} == {one, other}
        was = [question.state.running.get(name) for name in (one, other)]
        frozen = question.settings.within_round or question.settings.min_run_seconds
        together = was[0] == was[1] is not None and (frozen or question.settings.max_moves_per_hour == 0)
        least = 0.0 if together else 1.0 if was[0] == was[1] is not None else 1.05
        assert question.shared.pair_speed(one, other, node.gpu_type) >= least or limit_is_used_up(question)


def limit_is_used_up(question):
    limit = question.settings.max_moves_per_hour
    return limit is not None and limit <= sum(question.now - at < 3600.0 for at in question.state.moves) + 1


def gangs_are_whole(question, decided):
    """In its pools, of types that it can use, in whole pods, of a size of its own, in the domain it asks."""
    nodes = {node.name: node for node in question.nodes}
    for job in question.jobs:
        name, at = job.name, decided.placements.get(job.name)
        if at is None:
            continue
        held = question.state.running.get(name)
        assert in_its_pools(at, nodes) and at.pool == at.by_pool[0].pool
        assert [nodes[node].pool for node in at.nodes] == [p.pool for p in at.by_pool for _ in range(p.gpus)]
        assert in_whole_pods(at.nodes, question.asks_of(name).per_pod)
        assert all(job.throughput.get(part.gpu_type, 0.0) > 0 for part in at.by_pool)
        sizes = {job.gpus} if held is None else {len(held.nodes), job.gpus}
        if name in question.elastic:
            sizes |= {*question.elastic[name].speeds[at.gpu_type]}
        if name in question.mixed:
            sizes |= {*question.mixed[name].sizes}
        assert len(at.nodes) in sizes and (not at.parts or name in question.mixed)
        request = question.asks_of(name).required
        # With several pools, a topology is refused to users.
        if request is not None and name not in question.mixed:
            assert len({nodes[node].domain(request.level) for node in at.nodes}) == 1
        new = Counter(at.nodes) - Counter(held.nodes if held is not None else ())
        barred = question.asks_of(name).barred
        if name in decided.started or name in decided.moved:
            new = Counter(at.nodes)
        assert not any(nodes[node].closed or nodes[node].taints in barred for node in new)


def changes_are_what_they_are_called(question, decided):
    """Each job in one list, by where it was and is; what is resized gets there without a restart."""
    lists = ("extended", "started", "moved", "resized", "stopped", "waiting")
    assert sorted(itertools.chain(*(getattr(decided, kind) for kind in lists))) == sorted(
        job.name for job in question.jobs
    )
    for kind, name in [(called, name) for called in lists for name in getattr(decided, called)]:
        was, at = question.state.running.get(name), decided.placements.get(name)
        assert (was is None) == (kind in ("started", "waiting")) and (at is None) == (
            kind in ("stopped", "waiting")
        )
        assert (was is not None and was == at) == (kind == "extended")
        if kind == "resized" and name not in question.pending:
            gang = question.elastic.get(name) or question.mixed[name]
            assert stays(was, at, gang.together)
            assert gang.may_grow if len(at.nodes) > len(was.nodes) else gang.may_shrink
    assert decided.reasons.keys() == {job.name for job in question.jobs}


def gangs_are_disturbed_within_bounds(question, decided):
    """Not within a round, not before their least time, and no more than the hour allows."""
    running, two = question.state.running, question.shared.memory
    has = {node.name: node.gpus * (2 if node.name in two else 1) for node in question.nodes}
    held = Counter(itertools.chain(*(at.nodes for at in running.values())))
    rates = {job.name: job.throughput for job in question.jobs}
    forced = {
        name
        for name, at in running.items()
        if any(held[node] > has.get(node, 0) for node in at.nodes) or not rates[name][at.gpu_type]
    }
    disturbed, settings = {*decided.moved, *decided.stopped} - question.pending - forced, question.settings
    assert not (disturbed and settings.within_round)
    assert all(question.ran(name) >= settings.min_run_seconds for name in disturbed)
    if settings.max_moves_per_hour is not None:
        recent = sum(question.now - at < 3600.0 for at in question.state.moves)
        assert len(disturbed) <= max(0, settings.max_moves_per_hour - recent)


def spread_gangs_move_where_it_pays(question, decided):
    """To fewer nodes, with the gain that is asked for, and not onto what others have or leave."""
    for name, gang in question.spread.items():
        at = decided.placements.get(name)
        if name in decided.moved and decided.reasons[name].startswith("moves from"):
            assert gang.may_move and gang.packed_speed > gang.speed * (1 + LEAST_GAIN)
            assert len(at.nodes) == len(gang.at.nodes) and len(set(at.nodes)) <= gang.fewest
            held = [place.nodes for other, place in question.state.running.items() if other != name]
            used = Counter(itertools.chain(at.nodes, *held))
            assert all(used[node.name] <= node.gpus for node in question.nodes if node.name in at.nodes)


def spot_limits_hold(question, decided):
    """Where something is started on spot machines, afterwards; a job that is kept off is told why."""
    limits, places = question.spot, {node.name: node.place for node in question.nodes}
    if not limits.limits:
        return
    placements = decided.first_placements
    there = {job: nodes_by_place(at, places, limits.pools) for job, at in placements.items()}
    used = Counter()
    for of_job in there.values():
        used.update({place: len(names) for place, names in of_job.items()})
    started = launches(placements, question.state.running, limits.pools, places)
    if started:
        total = sum(len(at.nodes) for at in placements.values())
        assert used.total() <= (1 - limits.on_demand_share) * total + 1e-6
    for place in {launch.place for launch in started}:
        sizes = [len(there[launch.job][place]) for launch in started if launch.place == place]
        part = limits.most_in_one_pool
        assert any(used[place] - size <= part * (used.total() - size) + 1e-6 for size in sizes)
    for name, why in decided.blocked_by_spot_limit.items():
        at = decided.placements.get(name)
        assert why in decided.reasons[name] and not (at is not None and at.pool in limits.pools)


def tenants_keep_to_their_room(question, decided):
    """But for the least sizes of gangs, which are admitted before."""
    given = given_to_tenants(question, decided.placements)
    least = given_to_tenants(
        question,
        {
            name: dataclasses.replace(at, nodes=question.least(name, at))
            for name, at in decided.placements.items()
        },
    )
    assert all(given[tenant] <= max(room, least[tenant]) for tenant, room in question.room.items())


def none_waits_beside_its_room(question, decided):
    """A gang that waits finds no pool that could hold it, unless that is kept for another such gang."""
    used = Counter(node for at in decided.placements.values() for node in at.nodes)
    free = {node.name: max(0, node.gpus - used[node.name]) for node in question.nodes}
    waiting = decided.reasons.keys() - decided.placements.keys()
    for job in question.jobs:
        kept = any(f"kept for {name}" in decided.reasons[job.name] for name in waiting)
        if job.name in waiting and not kept:
            asks = question.asks_of(job.name)
            for pool, gpu_type in TYPES.items():
                usable = [
                    node
                    for node in question.nodes
                    if node.pool == pool and not node.closed and node.taints not in asks.barred
                ]
                if job.throughput[gpu_type] > 0 and usable:
                    assert pack(job.gpus, usable, free, asks.per_pod, asks.topology) is None


LAWS = (
    nodes_hold_what_is_given,
    gangs_are_whole,
    changes_are_what_they_are_called,
    gangs_are_disturbed_within_bounds,
    spread_gangs_move_where_it_pays,
    spot_limits_hold,
    tenants_keep_to_their_room,
)


seeds = st.integers(0, 2**32 - 1)
each_kind = pytest.mark.parametrize(
    "kinds",
    [
        (),
        KINDS,
        ("tenants", "elastic"),
        ("planned", "elastic"),
        ("losses", "elastic", "mixed"),
        ("taints", "pods", "racks"),
        *(
            pytest.param(kinds, marks=pytest.mark.slow)
            for kinds in (("taints", "pods"), ("losses", "shared"), *((kind,) for kind in KINDS[:-2]))
        ),
    ],
    ids=",".join,
)


@each_kind
@example(seed=698)  # pods by completion time: what was chosen in place of too many moves moves others
@example(seed=248)  # by completion time: what others grew by is not given to a waiting job of their tenant
@example(seed=10000687)  # several pools, not held yet: what others have got of it is not replaced
@example(seed=300086)  # pods: what is free is kept for a gang that has room in it
@example(seed=300125)  # taints and pods: a gang has room in two groups of nodes, and its pods not in one
@example(seed=80151)  # taints and pods: a pool is kept for a gang that finds nodes for its pods elsewhere
@example(seed=50075)  # racks: a gang takes its nodes in another group than it was granted
@example(seed=1076)  # elastic: a gang that goes to another pool leaves room for one that waits
@example(seed=2096)  # elastic: a gang that cannot shrink, and has to leave, starts with its least size
@example(seed=101)  # losses: a gang goes on with its first ranks where the pool of its last is gone
@example(seed=112)  # losses: by completion time the gang that has lost its node leaves, not another one
@example(seed=486)  # losses: by completion time a gang's pool has no GPUs left
@example(seed=80113)  # pods: GPUs kept for a gang that finds nodes for its pods elsewhere come free
@given(seed=seeds)
def test_rounds_one_after_the_other_keep_every_law(kinds, seed):
    """With each kind of gang, node and limit alone, and with all of them."""
    for question, decided in played(random.Random(seed), kinds):
        for law in LAWS:
            law(question, decided)
        if not {*kinds} - {"taints", "pods", "racks", "spread", "elastic"}:
            none_waits_beside_its_room(question, decided)


@pytest.mark.slow
@given(seed=seeds)
def test_the_same_question_gives_the_same_round(seed):
    """Decisions can be replayed."""
    assert all(decide_round(question) == decided for question, decided in played(random.Random(seed), KINDS))


def carried_out(question, decided, **changes):
    """The same question again, with what was decided running since then."""
    since = {name: question.state.running_since.get(name, question.now) for name in decided.placements}
    state = dataclasses.replace(question.state, running=decided.placements, running_since=since)
    held = {name: len(at.nodes) for name, at in decided.placements.items() if name in question.mixed}
    return dataclasses.replace(
        question,
        jobs=[dataclasses.replace(job, gpus=held.get(job.name, job.gpus)) for job in question.jobs],
        state=state,
        pending=frozenset(),
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("elastic",), ("mixed",), ("shared",), ("elastic", "mixed", "pods")], ids=",".join
)
@given(seed=seeds)
def test_what_was_decided_comes_to_rest(kinds, seed):
    """Within a round, with its answers running, the same question changes nothing more."""
    for question, first in played(random.Random(seed), kinds, rounds=2):
        decided, within = first, dataclasses.replace(question.settings, within_round=True)
        for _ in range(3):
            decided = decide_round(carried_out(question, decided, settings=within))
        assert decide_round(carried_out(question, decided, settings=within)).placements == decided.placements


def live(question, **changes):
    """Every gang may change its size."""
    elastic = {
        name: dataclasses.replace(gang, may_shrink=True, may_grow=True)
        for name, gang in question.elastic.items()
    }
    return dataclasses.replace(question, elastic=elastic, pending=frozenset(), **changes)


@pytest.mark.slow
@example(seed=222, surplus=Surplus.LEVEL)  # a gang without a share has more GPUs of a slower type
@example(seed=145, surplus=Surplus.LONGEST)  # so it has, and another grows in the pool that it leaves
@example(seed=418, surplus=Surplus.LONGEST)  # a gang leaves for its share what its sizes are worth more in
@example(seed=522, surplus=Surplus.FINISH_TIME)  # it would be faster in a pool where others have all
@example(seed=90214, surplus=Surplus.FINISH_TIME)  # so it would, and comes to another pool of that type
@example(seed=310, surplus=Surplus.COMPLETION_TIME)  # four rounds, each a better one
@example(seed=3000489, surplus=Surplus.ARRIVAL)  # it has run on the other type, of which it has no share
@example(seed=3003613, surplus=Surplus.THROUGHPUT)  # of the other type it has had more than its share
@example(seed=196, surplus=Surplus.COST)  # 6 GPUs are dearer a step than 5, and 7 are cheaper
@given(seed=seeds, surplus=st.sampled_from(Surplus))
def test_sizes_come_to_rest_at_the_ends_of_rounds(seed, surplus):
    """After at most four."""
    for asked, _ in played(random.Random(seed), ("elastic",), rounds=2):
        question = live(asked, surplus=surplus, settings=RoundSettings(round_seconds=60.0))
        decided = decide_round(question)
        for _ in range(4):
            before, decided = decided, decide_round(carried_out(question, decided))
        assert sizes_of(decided) == sizes_of(before)


@pytest.mark.slow
@example(seed=81864, surplus=Surplus.LEVEL)  # its share is drawn to the pool beside the one that wins
@example(seed=90147, surplus=Surplus.SHORTEST)  # it has no share, and at its least size the other type wins
@given(seed=seeds, surplus=st.sampled_from(Surplus))
def test_where_no_pool_is_short_of_gpus_no_gang_is_moved_back_and_forth(seed, surplus):
    """With nothing else changing, none is moved twice once the first rounds are over."""
    for asked, _ in played(random.Random(seed), ("elastic",), rounds=1):
        wide = [dataclasses.replace(node, gpus=node.gpus + 9) for node in asked.nodes]
        question = dataclasses.replace(asked, nodes=wide, surplus=surplus, settings=RoundSettings())
        moved, stopped = Counter(), Counter()
        for number in range(8):
            decided = decide_round(question)
            if number >= 4:
                moved.update(decided.moved)
                stopped.update(decided.stopped)
            question = carried_out(question, decided, now=question.now + 360.0 * number)
        # Gangs that are stopped for others take turns: their pool is short of GPUs.
        assert stopped or all(count == 1 for count in moved.values())


def sizes_of(decided):
    return {name: len(at.nodes) for name, at in decided.placements.items()}


@pytest.mark.slow
@example(seed=2871)  # a gang that ends in 13 s takes no GPU for a pause of one
@given(seed=seeds)
def test_no_gpu_is_idle_that_an_elastic_gang_could_use(seed):
    """Every step of size that a gang may still take is one that its pool has no room for."""
    for asked, _ in played(random.Random(seed), ("elastic",), rounds=3):
        question = live(asked, surplus=Surplus.LEVEL)
        decided, free = decide_round(question), Counter()
        steps = {job.name: job.steps_remaining for job in question.jobs}
        used = Counter(node for at in decided.placements.values() for node in at.nodes)
        for node in question.nodes:
            free[node.pool] += node.gpus - used[node.name]
        for name, at in decided.placements.items():
            was, gang = question.state.running.get(name), question.elastic.get(name)
            gave_back = name in decided.resized and set(was.nodes) - set(at.nodes)
            if gang is None or gave_back or (was is not None and len(at.nodes) < len(was.nodes)):
                continue
            now, speeds, left = len(at.nodes), gang.speeds[at.gpu_type], steps[name]
            larger = [
                size
                for size in speeds
                if size > now and speeds[size] > speeds[now] * 1.03
                # One that is about to end saves less than the pause.
                if left is None or left / speeds[now] - left / speeds[size] > gang.pause_seconds
            ]
            assert not larger or min(larger) - now > free[at.pool]


@given(seed=seeds, surplus=st.sampled_from([one for one in Surplus if one is not Surplus.COMPLETION_TIME]))
def test_who_runs_is_decided_at_the_least_sizes(seed, surplus):
    """A gang that waits is not kept out by another one's extra GPUs, where shares say who runs."""
    for asked, _ in played(random.Random(seed), ("elastic",), rounds=3):
        nodes = [node for node in asked.nodes if node.gpu_type == "v100"]
        running = {name: at for name, at in asked.state.running.items() if at.gpu_type == "v100"}
        question = live(
            asked,
            nodes=nodes,
            # An elastic gang has its shares of all types together, also of one without nodes.
            shares={name: {"v100": share["v100"], "k80": 0.0} for name, share in asked.shares.items()},
            state=dataclasses.replace(asked.state, running=running),
            surplus=surplus,
            settings=RoundSettings(round_seconds=60.0),
        )
        least = {
            name: dataclasses.replace(at, nodes=question.least(name, at)) for name, at in running.items()
        }
        state = dataclasses.replace(question.state, running=least)
        alone = decide_round(dataclasses.replace(question, elastic={}, state=state))
        assert decide_round(question).placements.keys() >= alone.placements.keys()


@pytest.mark.slow
@given(seed=seeds)
def test_limits_of_spot_machines_that_nothing_exceeds_change_nothing(seed):
    """The decision is the one without limits."""
    for question, _ in played(random.Random(seed), ("elastic", "spot"), rounds=2):
        free = decide_round(dataclasses.replace(question, spot=SpotLimits()))
        places, by_place = {node.name: node.place for node in question.nodes}, Counter()
        for at in free.placements.values():
            for place, names in nodes_by_place(at, places, question.spot.pools).items():
                by_place[place] += len(names)
        total, spot = sum(sizes_of(free).values()), by_place.total()
        enough = dataclasses.replace(
            question.spot,
            on_demand_share=(total - spot) / total if total else 0.0,
            most_in_one_pool=max((count / spot for count in by_place.values()), default=1.0),
        )
        assert decide_round(dataclasses.replace(question, spot=enough)) == free
