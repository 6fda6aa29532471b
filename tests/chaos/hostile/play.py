"""Hostile objects beside ordinary jobs, and what has to hold meanwhile and at the end."""

import dataclasses
import http.client
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ballast_localcluster.rest import CallError
from ballast_localcluster.waiting import patience
from ballast_operator.local_operator import OPERATOR_NAME, OPERATOR_NAMESPACE
from ballast_policies.contract import lease_name

from tests.chaos.hostile.arena import POLICY, Arena
from tests.chaos.hostile.author import Author, Hostile
from tests.chaos.hostile.jobs import JOBS_PATH, NAMESPACE, training_job
from tests.chaos.hostile.kinds import KINDS
from tests.chaos.hostile.other_kinds import POLICIES_PATH, in_the_way
from tests.support.access import account

ORDINARY = 4
"""Ordinary jobs, spread over the time in which hostile objects come."""

END_SECONDS = 120.0
"""In which ordinary jobs have to end, and hostile objects to be answered, times ``BALLAST_PATIENCE``."""

LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
OPERATOR = account(OPERATOR_NAMESPACE, OPERATOR_NAME)
MANAGER = "ballast-operator"
CHANGES = frozenset({"update", "patch", "delete", "deletecollection"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        problems: empty: everything held.
        taken: hostile objects that the API server took, by kind.
        refused: those that it did not take.
        slowest: the longest answer of ``/healthz``, seconds.
        seconds: from the first hostile object to the end.
    """

    problems: tuple[str, ...]
    taken: Counter[str]
    refused: Counter[str]
    slowest: float
    seconds: float


class Play:
    """One run."""

    def __init__(self, arena: Arena, seed: int, say: Callable[[str], None]) -> None:
        self._arena, self._say = arena, say
        self._rng = random.Random(seed)
        self._ordinary: dict[str, str] = {}
        self._jobs: list[Hostile] = []
        self._policies: list[Hostile] = []
        self._bystanders: dict[str, dict[str, Any]] = {}
        self._to_lie: dict[str, Hostile] = {}
        self.taken, self.refused = Counter[str](), Counter[str]()
        self.problems: list[str] = []

    def objects(self, count: int) -> None:
        """Create ``count`` hostile objects, all kinds in turn, and ordinary jobs among them."""
        kinds = list(KINDS)
        self._rng.shuffle(kinds)
        for number in range(count):
            if number % max(1, count // ORDINARY) == 0 and len(self._ordinary) < ORDINARY:
                self._add_ordinary()
            author = Author(self._rng, dict(self._ordinary), self._arena.folder / "checkpoints")
            kind = kinds[number % len(kinds)]
            hostile = KINDS[kind](author, number)
            if kind == "TrainingJob whose names are taken":
                self._create(in_the_way(author, hostile))
            self._create(hostile)
            self._lie()
            if number % 10 == 9:
                self._write_policy_status()

    def settle(self) -> None:
        """Until every ordinary job has ended and every hostile object is answered."""
        deadline = time.monotonic() + END_SECONDS * patience()
        unfinished, silent = list(self._ordinary), [*self._jobs, *self._policies]
        while (unfinished or silent) and time.monotonic() < deadline and self._alive():
            self._lie()
            unfinished = [name for name in unfinished if self._state(name) not in ("Succeeded", "Failed")]
            silent = [one for one in silent if not self._answered(one)]
            time.sleep(0.3)
        for name in self._ordinary:
            if self._state(name) != "Succeeded":
                item = self._arena.find(f"{JOBS_PATH}/{name}") or {}
                self.problems.append(f"lost: ordinary job {name}: {json.dumps(item.get('status'))}")
        self.problems += [f"not answered: {one.kind}, {one.name}" for one in silent]
        if self._to_lie:
            self._say(f"never ran, and so never lied: {', '.join(self._to_lie)}")

    def look_back(self, slowest_seconds: float) -> None:
        """What the operator is, has said and has written."""
        arena = self._arena
        if not self._alive():
            self.problems.append(f"ended: the operator, with code {arena.operator.returncode}")
        self.problems += [f"not healthy: {text}" for text in arena.unhealthy]
        if arena.slowest > slowest_seconds:
            self.problems.append(f"slow: /healthz took {arena.slowest:.2f} s, at most {slowest_seconds:g}")
        self.problems += _bugs(arena.log)
        self.problems += self._changed()
        self.problems += list(_written(arena.local.audit_log, self._bystanders.keys()))

    def _add_ordinary(self) -> None:
        name = f"ordinary-{len(self._ordinary)}"
        stages = 1 + len(self._ordinary) % 2
        job = training_job(name, self._arena.folder / "checkpoints", total=60, stages=stages)
        self._ordinary[name] = self._arena.rest.call("POST", JOBS_PATH, job)["metadata"]["uid"]

    def _create(self, hostile: Hostile) -> None:
        path = f"{hostile.path}/{hostile.name}"
        try:
            self._arena.create(hostile.path, hostile.text)
        except CallError as error:
            self.refused[hostile.kind] += 1
            self._say(f"refused: {hostile.kind}: {str(error)[:200]}")
            return
        self.taken[hostile.kind] += 1
        if hostile.status is not None:
            self._write_status(path, hostile.status)
        if hostile.path == JOBS_PATH:
            self._jobs.append(hostile)
        elif hostile.path == POLICIES_PATH:
            self._policies.append(hostile)
        else:
            item = self._arena.find(path)
            if item is not None:
                self._bystanders[path] = item
        if hostile.lies:
            self._to_lie[hostile.name] = hostile

    def _write_status(self, path: str, status: dict[str, Any]) -> None:
        """Field by field: a field that the API server refuses does not keep the others out."""
        for field, value in status.items():
            try:
                self._arena.merge(f"{path}/status", {"status": {field: value}})
            except CallError as error:
                self._say(f"refused: status.{field}: {str(error)[:200]}")

    def _write_policy_status(self) -> None:
        """Of the policy in force, too."""
        author = Author(self._rng, dict(self._ordinary), self._arena.folder)
        status = KINDS["ClusterPolicy"](author, 0).status
        field = self._rng.choice(sorted(status))
        self._write_status(f"{POLICIES_PATH}/{POLICY}", {field: status[field]})

    def _lie(self) -> None:
        """Put the lies on the Leases that are there by now."""
        for name, hostile in list(self._to_lie.items()):
            if self._state(name) not in ("Running", "Succeeded", "Failed"):
                continue
            del self._to_lie[name]
            for annotation, text in hostile.lies.items():
                try:
                    self._arena.merge(
                        f"{LEASES}/{lease_name(name)}", {"metadata": {"annotations": {annotation: text}}}
                    )
                except CallError as error:
                    self._say(f"refused: a lie: {str(error)[:200]}")

    def _alive(self) -> bool:
        return self._arena.operator.poll() is None

    def _state(self, name: str) -> str:
        item = self._arena.find(f"{JOBS_PATH}/{name}")
        return "" if item is None else (item.get("status") or {}).get("state") or ""

    def _answered(self, hostile: Hostile) -> bool:
        """Whether the operator has said something in its status; one that goes needs no answer."""
        item = self._arena.find(f"{hostile.path}/{hostile.name}")
        if item is None or item["metadata"].get("deletionTimestamp"):
            return True
        if any(
            entry.get("manager") == MANAGER and entry.get("subresource") == "status"
            for entry in item["metadata"].get("managedFields", [])
        ):
            return bool((item.get("status") or {}).get("conditions"))
        return False

    def _changed(self) -> Iterator[str]:
        """Objects of others that are not as they were; what others do themselves is not counted."""
        for path, before in self._bystanders.items():
            after = self._arena.find(path)
            if after is None:
                yield f"gone: {path}"
            elif any(entry.get("manager") == MANAGER for entry in after["metadata"].get("managedFields", [])):
                yield f"changed: {path} by the operator"
            elif before["kind"] not in ("Node", "Pod") and _version(after) != _version(before):
                yield f"changed: {path}: {json.dumps(after)[:2000]}"


def _version(item: dict[str, Any]) -> str:
    return str(item["metadata"]["resourceVersion"])


def _bugs(log: Path) -> Iterator[str]:
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("Traceback"):
            around = "\n".join(lines[max(0, number - 2) : number + 60])
            yield f"a bug: the operator logged\n{around}"
            return


def _written(log: Path, bystanders: Any) -> Iterator[str]:
    """Changes by the operator's account of objects of others, and of more of a job than its status."""
    names = {tuple(re.sub(r".*/([^/]+)/([^/]+)$", r"\1 \2", path).split()) for path in bystanders}
    changes = 0
    for line in log.read_text(errors="replace").splitlines():
        event = json.loads(line)
        asked = event.get("objectRef")
        if asked is None or event["user"]["username"] != OPERATOR or event["verb"] not in CHANGES:
            continue
        if event.get("responseStatus", {}).get("code", 500) >= http.client.BAD_REQUEST:
            continue
        changes += 1
        what = f"{event['verb']} {asked['resource']} {asked.get('namespace', '')}/{asked.get('name', '')}"
        if (asked["resource"], asked.get("name")) in names:
            yield f"changed: {what} by the operator"
        if asked["resource"] == "trainingjobs" and asked.get("subresource") != "status":
            yield f"changed: {what} by the operator, beside its status"
    if not changes:
        yield "blind: the audit log has nothing of the operator"


def play(
    seed: int,
    objects: int,
    folder: Path,
    *,
    slowest_seconds: float,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Let ``objects`` hostile objects loose on a cluster of its own.

    Args:
        seed: chooses them.
        objects: how many.
        folder: for logs and checkpoints.
        slowest_seconds: that an answer of ``/healthz`` may take.
        say: takes a line for each that is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Arena(folder) as arena:
        began = time.monotonic()
        run = Play(arena, seed, say)
        run.objects(objects)
        run.settle()
        run.look_back(slowest_seconds)
        return Outcome(
            problems=tuple(run.problems),
            taken=run.taken,
            refused=run.refused,
            slowest=arena.slowest,
            seconds=time.monotonic() - began,
        )
