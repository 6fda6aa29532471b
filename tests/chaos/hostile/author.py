"""Who writes hostile objects, by seed, and the register of their kinds."""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract import ACK_ANNOTATION, FINISHED_ANNOTATION, REPORT_ANNOTATION

from tests.chaos.hostile.jobs import JOBS_PATH, training_job
from tests.chaos.processes import hostile as specs

BALLAST = "ballast.dev/v1alpha1"
TEXTS = (
    "NaN",
    "-Infinity",
    "1e400",
    "9" * 5000,
    "[" * 1100,
    '{"a":' * 600 + "1" + "}" * 600,
    "\u0000\u202e\u001b[2J",
    "null",
    "",
    "x" * 200_000,
)
"""Values of annotations and data: no numbers, too large, too deep, control characters, long."""

KEYS = (
    "ballast.dev/written",
    "ballast.dev/priority",
    "kubectl.kubernetes.io/last-applied-configuration",
    "kopf.zalando.org/last-handled-configuration",
    REPORT_ANNOTATION,
    ACK_ANNOTATION,
    FINISHED_ANNOTATION,
)

TIMES = ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-02-30T00:00:00Z", "0001-01-01T00:00:00Z")
AMOUNTS = (0, 1e308, 5e-324, 2**63 - 1, 10**12, 0.1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One of them.

    Attributes:
        kind: what is wrong, of ``KINDS``.
        path: of the collection that it is created in.
        name: its name.
        text: as it is sent.
        status: what a stranger writes into its status afterwards; None: nothing.
        lies: annotation -> text that a stranger puts on the Lease of the job once it has one.
        answered: the operator has to say something of it.
    """

    kind: str
    path: str
    name: str
    text: str
    status: Any = None
    lies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    answered: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Author:
    """Who writes them.

    Attributes:
        rng: of the seed.
        ordinary: names of ordinary jobs, with their UIDs.
        folder: for the jobs that run after all.
    """

    rng: random.Random
    ordinary: Mapping[str, str]
    folder: Path

    def job(self, kind: str, number: int, *, name: str = "", **changes: Any) -> Hostile:
        """A TrainingJob that would run, with other metadata, spec or status."""
        name = name or f"hostile-{number}"
        item = training_job(name, self.folder, total=20)
        item["metadata"].update(changes.pop("metadata", {}))
        spec = changes.pop("spec", {})
        text = json.dumps({**item, "spec": {**item["spec"], **spec}})
        text = text.replace(f'"{specs.DEEP}"', '{"a":' * specs.LEVELS + "1" + "}" * specs.LEVELS)
        return Hostile(kind=kind, path=JOBS_PATH, name=name, text=text, answered=True, **changes)

    def other(self, kind: str, path: str, item: dict[str, Any], **changes: Any) -> Hostile:
        """An object of somebody else."""
        return Hostile(kind=kind, path=path, name=item["metadata"]["name"], text=json.dumps(item), **changes)

    def victim(self) -> str:
        """Name of an ordinary job."""
        return self.rng.choice(sorted(self.ordinary))

    def annotations(self) -> dict[str, str]:
        """Some keys with some texts."""
        return {key: self.rng.choice(TEXTS) for key in self.rng.sample(KEYS, 3)}

    def stranger(self, *, controller: bool = True) -> dict[str, Any]:
        """An owner that is not there, or is not what it says."""
        victim = self.victim()
        return self.rng.choice(
            [
                {"apiVersion": BALLAST, "kind": "TrainingJob", "name": victim, "uid": "0-0-0"},
                {"apiVersion": "v1", "kind": "Node", "name": "fast-0", "uid": "1-1-1"},
            ]
        ) | {"controller": controller}


Make = Callable[[Author, int], Hostile]
KINDS: dict[str, Make] = {}


def kind(name: str) -> Callable[[Make], Make]:
    """Register a kind of hostile object."""

    def registered(make: Make) -> Make:
        KINDS[name] = make
        return make

    return registered
