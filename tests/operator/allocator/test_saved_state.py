"""Accounts, measured speeds and layers as one object: exact, bounded in size, read with tolerance."""

import asyncio
import base64
import dataclasses
import json
import math
import random
import threading
import zlib
from typing import Any

import pytest
from ballast_operator.allocator import saved_state
from ballast_operator.allocator.saved_state import (
    MOST_BYTES,
    STATE_KEY,
    STATE_NAME,
    SavedState,
    StateStore,
    decode,
    encode,
    read_layers,
)
from ballast_operator.errors import Forbidden, Unavailable
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.scheduling.measurements import KindProfile, Measured
from ballast_policies.throughput.speeds import Estimate, SpeedKey

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.world import World
from tests.support.waiting import WAIT_SECONDS

TYPES = ("a100", "v100 at 0.74", "v100 at 2.48", "p100", "k80")


def a_state(jobs: int, seed: int = 0) -> SavedState:
    """Distinct jobs with names and figures as real ones have them."""
    draw = random.Random(seed)
    names = [f"team-{draw.randrange(40)}/train-{draw.getrandbits(40):010x}-{i}" for i in range(jobs)]

    def rows() -> dict[str, dict[str, float]]:
        return {
            name: {t: draw.uniform(0.001, 4000) for t in draw.sample(TYPES, draw.randint(1, 4))}
            for name in names
        }

    def speeds() -> dict[SpeedKey, Estimate]:
        known = draw.sample(("a100", "v100", "p100"), draw.randint(1, 2))
        return {
            SpeedKey.of(t, draw.randint(1, 16)): Estimate(
                steps_per_second=draw.uniform(0.1, 9), deviation=0.04, source="measured", reports=7
            )
            for t in known
        }

    memory = RoundMemory(
        promised=rows(),
        received=rows(),
        shares={name: {t: share / 4001 for t, share in row.items()} for name, row in rows().items()},
        at=1_763_000_000.25,
        moves=(1_762_999_000.0,),
        gpu_types={"v100 at 0.74": "v100", "v100 at 2.48": "v100"},
    )
    return SavedState(
        memory=memory,
        jobs={
            tuple(name.split("/")): Measured(launch=2, step=draw.randrange(10**6), speeds=speeds())
            for name in names
        },
        kinds={f"{draw.getrandbits(64):016x}": speeds() for _ in range(min(100, jobs))},
    )


def assert_alike(found: SavedState, want: SavedState, rel: float) -> None:
    assert found.memory is not None and want.memory is not None
    assert (found.memory.at, found.memory.moves) == (want.memory.at, want.memory.moves)
    assert found.memory.gpu_types == want.memory.gpu_types
    for job, shares in want.memory.shares.items():
        assert found.memory.shares[job] == pytest.approx(shares, rel=rel)
        for side in ("promised", "received"):
            got, expected = getattr(found.memory, side), getattr(want.memory, side)
            assert got[job] == pytest.approx(expected[job], rel=rel)


@pytest.mark.slow
def test_five_thousand_jobs_fit_and_are_read_as_they_were():
    """Under half of what is written at most, to nine digits."""
    state = a_state(5000)
    content = encode(state)
    assert len(content) < MOST_BYTES
    found = decode(content)
    assert_alike(found, state, rel=1e-8)
    assert found.jobs.keys() == state.jobs.keys()
    assert list(found.kinds) == list(state.kinds)


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_and_those_to_whom_most_is_owed_stay():
    """Digits first, then speeds of single jobs, then accounts; never more than the limit."""
    state = a_state(400)
    full = len(encode(state))
    fewer_digits = decode(encode(state, most_bytes=full - 1))
    assert_alike(fewer_digits, state, rel=1e-3)
    assert fewer_digits.jobs.keys() == state.jobs.keys()
    small = encode(state, most_bytes=full // 8)
    assert len(small) <= full // 8
    found = decode(small)
    assert found.jobs == {} and found.kinds.keys() == state.kinds.keys()

    def owed(job: str) -> float:
        memory = state.memory
        return abs(sum(memory.promised[job].values()) - sum(memory.received[job].values()))

    kept = set(found.memory.shares)
    assert 0 < len(kept) < 400
    assert min(owed(job) for job in kept) >= max(owed(job) for job in state.memory.shares if job not in kept)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not compressed",
        zlib.compress(b"not json"),
        zlib.compress(b"[]"),
        zlib.compress(b'{"version": 2}'),
        zlib.compress(json.dumps({"version": 1, "memory": {"at": "soon", "jobs": {}}}).encode()),
        zlib.compress(b"[" * 100_000),
    ],
)
async def test_a_state_that_cannot_be_read_is_an_empty_one(content, caplog):
    """Nothing is restored, at the start or under an operator that runs and keeps its own; its log says so."""
    world = World()
    body = {
        "metadata": {"namespace": "n", "name": STATE_NAME},
        "binaryData": {STATE_KEY: base64.b64encode(content).decode()},
    }
    world.put(CONFIG_MAP, body)
    assert await StateStore(FakeCluster(world), "n").load() == SavedState()
    assert "nothing is restored from it" in caplog.text


def test_entries_that_make_no_sense_are_left_out():
    rows = {
        "team/good": [[0, 5.0], [0, 2.0], [0, 0.5]],
        "team/negative": [[0, -5.0], [], []],
        "team/unknown-type": [[7, 5.0], [], []],
        "team/odd": [[0], [], []],
        "team/text": ["words", [], []],
    }
    state = {"version": 1, "names": ["v100"], "memory": {"at": 1.0, "moves": [], "jobs": rows}, "jobs": 5}
    found = decode(zlib.compress(json.dumps(state).encode()))
    assert found.memory.shares == {"team/good": {"v100": 0.5}}
    assert found.memory.promised == {"team/good": {"v100": 5.0}}
    assert found.jobs == {}


async def test_it_is_written_only_when_it_has_changed():
    """One object, and no write with nothing new; it can be replaced by hand."""
    world = World()
    store, state = StateStore(FakeCluster(world), "n"), a_state(3)
    await store.save(state)
    await store.save(state)
    assert world.log == [f"apply ConfigMap {STATE_NAME}"]
    assert_alike(await store.load(), state, rel=1e-8)


@pytest.mark.parametrize("part", ["encode", "decode"])
async def test_the_operators_loop_turns_while_it_is_made_and_read(monkeypatch, part):
    """Of 5,000 jobs it takes so long that a busy machine's leader would lose its Lease."""
    store, whole = StateStore(FakeCluster(World()), "n"), getattr(saved_state, part)
    loop = asyncio.get_running_loop()

    def work(content: Any) -> Any:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(WAIT_SECONDS), "the loop waits for it"
        return whole(content)

    monkeypatch.setattr(saved_state, part, work)
    await store.save(a_state(1))
    assert (await store.load()).memory is not None


@pytest.mark.parametrize("change", ["restored", "deleted"])
async def test_what_others_have_put_in_its_place_is_not_written_over(change):
    """It is told apart from what was written last; once it is loaded, it is written again."""
    world = World()
    store, backup = StateStore(FakeCluster(world), "n"), encode(a_state(3))
    await store.load()
    await store.save(a_state(2))
    if change == "restored":
        content = {"binaryData": {STATE_KEY: base64.b64encode(backup).decode()}}
        world.put(CONFIG_MAP, {**world.get(CONFIG_MAP, "n", STATE_NAME), **content})
    else:
        world.drop(CONFIG_MAP, "n", STATE_NAME)
    await store.save(a_state(1))
    assert store.replaced
    assert await store.load() == (decode(backup) if change == "restored" else SavedState())
    await store.save(a_state(2))
    assert not store.replaced
    assert_alike(await store.load(), a_state(2), rel=1e-8)


async def test_without_the_right_to_write_the_operator_continues():
    """Logged, and tried again."""
    cluster = FakeCluster(World())
    apply = cluster.apply

    async def refuse(*_, **__):
        raise Forbidden("cannot patch resource")

    cluster.apply = refuse
    store = StateStore(cluster, "n")
    await store.save(a_state(1))
    cluster.apply = apply
    await store.save(a_state(1))
    assert (await store.load()).memory is not None


async def test_an_api_server_that_does_not_answer_is_not_taken_for_an_empty_state():
    """Else a slow start would forget what is owed."""
    cluster = FakeCluster(World())

    async def unreachable(*_, **__):
        raise Unavailable("no answer")

    cluster.get = unreachable
    with pytest.raises(Unavailable):
        await StateStore(cluster, "n").load()


PROFILE = KindProfile(
    ("team", "job"),
    MeasuredLayers(seconds=(0.25, 0.75), held_bytes=(10**9, 2**53), activation_bytes=(0, 5)),
)


def test_speeds_come_back_as_they_were():
    """Of jobs and of kinds, with how certain they are; one that is not certain at all is left out."""
    key, other = SpeedKey.of("v100", 4), SpeedKey.of("k80", 2)
    known = Estimate(steps_per_second=2.5, deviation=0.125, source="measured", reports=7)
    speeds = {key: known, other: dataclasses.replace(known, source="prior", reports=0)}
    jobs = {("team", "one"): Measured(launch=2, step=40, speeds=speeds)}
    jobs |= {("team", "new"): Measured(launch=1, step=-1, speeds={})}
    unknown = {"b": {other: dataclasses.replace(known, deviation=math.inf), key: known}}
    found = decode(encode(SavedState(jobs=jobs, kinds={"a": speeds, **unknown})))
    assert found == SavedState(jobs=jobs, kinds={"a": speeds, "b": {key: known}})


def test_layers_come_back_as_they_were():
    """Whatever was not measured stays empty."""
    bytes_alone = KindProfile(("team", "other"), MeasuredLayers(held_bytes=(7,)))
    weights = KindProfile(("team", "third"), MeasuredLayers(held_bytes=(7,), weight_bytes=(3,)))
    layers = {"a": PROFILE, "b": bytes_alone, "c": weights}
    assert decode(encode(SavedState(layers=layers))).layers == layers


def test_a_state_that_is_too_large_gives_layers_up():
    layers = {str(kind): PROFILE for kind in range(100)}
    assert decode(encode(SavedState(layers=layers), most_bytes=200)).layers == {}


REST = [[]] * 5


@pytest.mark.parametrize(
    "entry",
    [
        [],
        None,
        ["team/job", [], [8], [1]],
        ["team/job", [], [], *REST],
        ["team/job", [1.0], [1, 2], *REST],
        ["team/job", [], [float("nan")], *REST],
        ["team/job", [], [-1], *REST],
        ["team/job", [], ["1"], *REST],
        ["team/job", [], [True], *REST],
        [7, [], [1], *REST],
        ["team/job", [], [1e400], *REST],
    ],
    ids=json.dumps,
)
def test_entries_that_make_no_sense_are_refused(entry):
    """The reader leaves them out and keeps the others."""
    with pytest.raises((TypeError, ValueError)):
        read_layers(entry)
