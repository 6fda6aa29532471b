"""Training jobs as values: what the API server says of one, lists of them, and manifests of new ones."""

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from ballast.client.errors import Refused

API_VERSION = "ballast.dev/v1alpha1"
ENDS = ("Succeeded", "Failed")
"""States that a job does not leave."""

STATES = ("New", "Waiting", "Starting", "Running", "Repacking", "Stopping", "Suspended", *ENDS)
"""All states; New: no operator has looked at the job yet."""

Object = Mapping[str, Any]


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a job, in the currency of the ClusterPolicy's prices.

    Attributes:
        so_far: all of it, up to ``at`` (RFC 3339; empty: nothing yet).
        lost: the part of it for steps that had to be done twice.
        by_pool: pool -> its part.
        budget: what it may cost; None: no limit.
    """

    so_far: float
    lost: float
    by_pool: Mapping[str, float]
    at: str
    budget: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A TrainingJob at one moment. A figure is None where it is not known.

    Attributes:
        raw: the object as the API server gives it.
    """

    raw: Object

    @property
    def name(self) -> str:
        """metadata.name."""
        return str(_at(self.raw, "metadata", "name") or "")

    @property
    def namespace(self) -> str:
        """metadata.namespace."""
        return str(_at(self.raw, "metadata", "namespace") or "")

    @property
    def version(self) -> str:
        """metadata.resourceVersion; empty: the API server has not answered with it."""
        return str(_at(self.raw, "metadata", "resourceVersion") or "")

    @property
    def created(self) -> str:
        """Time of its creation, RFC 3339."""
        return str(_at(self.raw, "metadata", "creationTimestamp") or "")

    @property
    def team(self) -> str:
        """spec.entity; empty: none."""
        return str(_at(self.raw, "spec", "entity") or "")

    @property
    def state(self) -> str:
        """One of :data:`STATES`."""
        return str(_at(self.raw, "status", "state") or "New")

    @property
    def finished(self) -> bool:
        """Succeeded, or failed for good."""
        return self.state in ENDS

    @property
    def gpus(self) -> int:
        """GPUs that it holds."""
        return int(_at(self.raw, "status", "allocation", "gpus") or 0)

    @property
    def gpu_type(self) -> str:
        """GPU type of rank 0; empty: it holds none."""
        return str(_at(self.raw, "status", "allocation", "gpuType") or "")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes."""
        return tuple(dict.fromkeys(map(str, _at(self.raw, "status", "allocation", "nodes") or ())))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(_at(self.raw, "status", "progress", "step") or 0)

    @property
    def total_steps(self) -> int:
        """spec.totalSteps."""
        return int(_at(self.raw, "spec", "totalSteps") or 0)

    @property
    def steps_per_second(self) -> float | None:
        """Its speed over the last seconds."""
        return _number(_at(self.raw, "status", "progress", "stepsPerSecond"))

    @property
    def loss(self) -> float | None:
        """Training loss of the last step."""
        return _number(_at(self.raw, "status", "progress", "loss"))

    @property
    def eta(self) -> str:
        """Time at which the last step is expected, RFC 3339; empty: not known."""
        return str(_at(self.raw, "status", "progress", "eta") or "")

    @property
    def restarts(self) -> int:
        """Number of launches that ended early."""
        counts = _at(self.raw, "status", "restarts")
        return sum(counts.values()) if isinstance(counts, Mapping) else 0

    @property
    def cost(self) -> Cost:
        """Cost so far."""
        status = _at(self.raw, "status")
        pools = _at(status, "poolCosts") or ()
        return Cost(
            so_far=_number(_at(status, "costSoFar")) or 0.0,
            lost=_number(_at(status, "lostCost")) or 0.0,
            by_pool={
                str(_at(part, "pool")): sum(_number(_at(part, of)) or 0.0 for of in ("cost", "dataCost"))
                for part in pools
            },
            at=str(_at(status, "costAt") or ""),
            budget=_number(_at(self.raw, "spec", "budget")),
        )

    @property
    def why(self) -> str:
        """Reason that it failed, waits, or has its GPUs: the message of the condition that says so."""
        conditions = {_at(one, "type"): one for one in _at(self.raw, "status", "conditions") or ()}
        for kind, status in (("Failed", "True"), ("Succeeded", "True"), ("Admitted", "False")):
            if _at(conditions.get(kind), "status") == status:
                return str(_at(conditions[kind], "message") or "")
        return str(_at(self.raw, "status", "lastDecision", "why") or "")

    def __repr__(self) -> str:
        held = f", {self.gpus} {self.gpu_type}" if self.gpus else ""
        return f"{self.namespace}/{self.name}: {self.state}, step {self.step}/{self.total_steps}{held}"

    def _repr_html_(self) -> str:
        return Jobs((self,))._repr_html_()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


COLUMNS = ("namespace", "job", "state", "team", "GPUs", "step", "steps/s", "loss", "cost")
WIDE_COLUMNS = (*COLUMNS, "restarts", "end", "nodes", "why")


@dataclasses.dataclass(frozen=True, slots=True)
class Jobs(Sequence[Job]):
    """Jobs at one moment; printed a line each, in a notebook a table.

    Attributes:
        jobs: by namespace and name.
        more: whether there are others, which the limit left out.
    """

    jobs: tuple[Job, ...]
    more: bool = False

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, index: int | slice) -> "Job | tuple[Job, ...]":
        return self.jobs[index]

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of texts for each job, as :data:`WIDE_COLUMNS`."""
        return [_row(job) for job in self.jobs]

    def __repr__(self) -> str:
        lines = [*map(str, self.jobs), *(["and others"] if self.more else [])]
        return "\n".join(lines) or "no jobs"

    def _repr_html_(self) -> str:
        width = len(COLUMNS)
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[:width]) + "</tr>"
            for row in self.rows()
        )
        more = "<caption>and others</caption>" if self.more else ""
        return f"<table>{more}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(job: Job) -> tuple[str, ...]:
    speed, loss = job.steps_per_second, job.loss
    return (
        job.namespace,
        job.name,
        job.state,
        job.team,
        f"{job.gpus} {job.gpu_type}" if job.gpus else "",
        f"{job.step}/{job.total_steps}",
        "" if speed is None else f"{speed:.3g}",
        "" if loss is None else f"{loss:.4g}",
        f"{job.cost.so_far:.2f}",
        str(job.restarts),
        job.eta,
        ",".join(job.nodes),
        job.why,
    )


def training_job(
    name: str,
    *,
    image: str,
    command: Sequence[str],
    steps: int,
    gpus: int | tuple[int, int] = 1,
    checkpoint: str | None = None,
    volume: str | None = None,
    environment: Mapping[str, str] | None = None,
    gpu_types: Sequence[str] = (),
    team: str | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """The manifest of a TrainingJob that runs a command of its own, one process a GPU.

    Args:
        name: of the job.
        image: of its container.
        command: program and arguments.
        steps: ``spec.totalSteps``.
        gpus: how many, or (the fewest, the most).
        checkpoint: folder for its checkpoints; default: ``/checkpoints/NAME`` where there is a volume.
        volume: a PersistentVolumeClaim, mounted at ``/checkpoints``.
        environment: name -> value.
        gpu_types: on which it may run; default: any.
        team: ``spec.entity``.
        budget: what it may cost.

    Raises:
        Refused: ``command`` or ``gpu_types`` is one text, whose letters would be taken for the list's.
    """
    for argument, value in (("command", command), ("gpu_types", gpu_types)):
        if isinstance(value, str):
            raise Refused(f"{argument}: {value!r:.80} is one text. To fix: give a list of texts")
    fewest, most = (gpus, gpus) if isinstance(gpus, int) else gpus
    container: dict[str, Any] = {"name": "train", "image": image, "command": list(command)}
    if environment:
        container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
    pod: dict[str, Any] = {"containers": [container]}
    if volume is not None:
        container["volumeMounts"] = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
        claim = {"claimName": volume}
        pod["volumes"] = [{"name": "checkpoints", "persistentVolumeClaim": claim}]
        checkpoint = checkpoint or f"/checkpoints/{name}"
    spec: dict[str, Any] = {"totalSteps": steps, "pipeline": {"minStages": fewest, "maxStages": most}}
    if checkpoint is not None:
        spec["checkpoint"] = {"path": checkpoint}
    if gpu_types:
        spec["gpuTypes"] = list(gpu_types)
    if team is not None:
        spec["entity"] = team
    if budget is not None:
        spec["budget"] = budget
    spec["template"] = {"spec": pod}
    return {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}
