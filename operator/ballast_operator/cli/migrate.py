"""``ballast migrate``: TrainingJobs from the jobs of other operators, and what has no place there."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click
from ballast_policies.contract.messages import GPU_RESOURCE

from ballast_operator.cli.live.manifests import read_manifests, title
from ballast_operator.cli.option_names import printable

GPU = re.compile(r"(nvidia|amd)\.com/(gpu|mig-.+)")
UNKNOWN_STEPS = 1_000_000
COPIED = "kubectl.kubernetes.io/last-applied-configuration"

WHY = {
    "cleanPodPolicy": "pods of a job that has ended are kept or deleted by Ballast",
    "schedulingPolicy": "gangs are whole without it; shares and teams are in the ClusterPolicy",
    "restartPolicy": "restarts are counted by `backoffLimit`",
    "runtimeRef": "what the runtime adds (image, volumes, environment) has to be written into the template",
    "initializer": "prepare model and data in a volume, or in an init container of the template",
    "preemptible": "Ballast may stop every job with a checkpoint",
    "rayVersion": "there is no Ray cluster",
    "headGroupSpec": "there is no Ray cluster",
    "runtimeEnvYAML": "put it into the image",
    "rdzvBackend": "the ranks find each other by the environment, as under torchrun",
    "managedBy": "",
}
"""Field -> what to do in its place."""


class _Source:
    """A manifest, and what of it has been carried over."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.item, self._taken = item, set[tuple[str, ...]]()

    def take(self, *path: str, default: Any = None) -> Any:
        """The value at ``path``, which counts as carried over."""
        value = self.look(*path)
        self._taken.add(path)
        return default if value is None else value

    def look(self, *path: str) -> Any:
        """The value at ``path``; None: there is none."""
        value: Any = self.item
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def whole(self, *path: str, default: int) -> int:
        """A whole number. Raises ClickException: it is none."""
        value = self.take(*path, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise click.ClickException(f"{'.'.join(path)}: {value!r:.40} is no number. To fix: correct it")
        return value

    def table(self, *path: str) -> dict[str, Any]:
        """A copy of an object. Raises ClickException: it is none."""
        value = self.take(*path, default={})
        if not isinstance(value, Mapping):
            raise click.ClickException(f"{'.'.join(path)}: it is no object. To fix: correct it")
        return dict(value)

    def left(self) -> Iterator[tuple[str, ...]]:
        """Fields of the spec that were not carried over."""
        yield from self._left(self.item.get("spec"), ("spec",))

    def _left(self, value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if path in self._taken:
            return
        inside = any(taken[: len(path)] == path for taken in self._taken)
        if isinstance(value, Mapping) and inside:
            for key, part in value.items():
                yield from self._left(part, (*path, key))
        elif value not in (None, {}, []):
            yield path


@click.command()
@click.argument("file", type=click.Path())
@click.option("--steps", type=click.IntRange(min=1), help="spec.totalSteps, which no other operator has.")
@click.option("--checkpoint", metavar="FOLDER", help="spec.checkpoint.path, on a volume of the pods.")
@click.option("--image", help="Where the manifest leaves it to a runtime.")
def migrate(file: str, steps: int | None, checkpoint: str | None, image: str | None) -> None:
    """Print TrainingJobs for the PyTorchJobs, TrainJobs, RayJobs and AdaptDLJobs in FILE.

    Each field and each object that is not carried over is named on standard error. Exit code 1: a job needs
    a correction, or an object is of no such kind.
    """
    import yaml

    from ballast_operator.api.read import InvalidObject, read_training_job

    made, names, wrong = [], set[tuple[str, str]](), False
    for item in read_manifests(file):
        try:
            job, said = converted(item, steps=steps, checkpoint=checkpoint, image=image)
        except click.ClickException as error:
            click.echo(printable(f"Error: {title(item)}: {error.message}"), err=True)
            wrong = True
            continue
        name = job["metadata"]["name"]
        key = str(job["metadata"].get("namespace")), name
        if key in names:
            said.append(f"to correct: metadata.name: a job before has {name}, too, and would be replaced")
            wrong = True
        names.add(key)
        try:
            read_training_job(job)
        except InvalidObject as error:
            said += [f"to correct: {problem}" for problem in error.problems]
            wrong = True
        for line in said:
            click.echo(printable(f"{name}: {line}"), err=True)
        made.append(job)
    click.echo(yaml.safe_dump_all(made, sort_keys=False, allow_unicode=True), nl=False)
    if wrong:
        raise SystemExit(1)


def converted(
    item: Mapping[str, Any],
    *,
    steps: int | None = None,
    checkpoint: str | None = None,
    image: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """(a TrainingJob, what has to be said of it). Raises ClickException: it is of no kind that is known."""
    kind, source = str(item.get("kind")), _Source(item)
    if kind not in KINDS or not str(item.get("apiVersion")).startswith(KINDS[kind][0]):
        known = ", ".join(f"{name} of {group}" for name, (group, _) in KINDS.items())
        raise click.ClickException(
            f"{item.get('apiVersion')} {kind!r:.60} is not known here. To fix: give one of {known}"
        )
    metadata, said = source.table("metadata"), list[str]()
    name = _name(metadata, said)
    kept = {
        "name": name,
        **{k: metadata[k] for k in ("namespace", "labels", "annotations") if metadata.get(k)},
    }
    if isinstance(kept.get("annotations"), Mapping):
        kept["annotations"] = {k: v for k, v in kept["annotations"].items() if k != COPIED}
    spec, template = KINDS[kind][1](source, said)
    if steps is None:
        said.append(f"totalSteps: {UNKNOWN_STEPS} stands for a number that is not known. To fix: --steps")
    spec = {"totalSteps": steps or UNKNOWN_STEPS, **spec}
    if checkpoint is None:
        said.append(
            "checkpoint.path: not known. To fix: --checkpoint, and save there (docs/tasks/run-any-script.md)"
        )
    else:
        spec["checkpoint"] = {"path": checkpoint}
    _fit_container(template, spec, image, said)
    for path in source.left():
        why = next((WHY[part] for part in reversed(path) if part in WHY), "")
        said.append(f"not carried over: {'.'.join(path)}" + (f" ({why})" if why else ""))
    content = {"apiVersion": "ballast.dev/v1alpha1", "kind": "TrainingJob", "metadata": kept}
    return {**content, "spec": {**spec, "template": template}}, said


def _name(metadata: Mapping[str, Any], said: list[str]) -> str:
    given = str(metadata.get("name") or metadata.get("generateName") or "job")
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower())[:48].strip("-").lstrip("0123456789-") or "job"
    if name != given:
        said.append(f"metadata.name: {name} in place of {given!r:.80}")
    return name


def _pytorch(source: _Source, said: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    replicas = ("spec", "pytorchReplicaSpecs")
    roles = [role for role in ("Worker", "Master") if source.look(*replicas, role)]
    if not roles:
        raise click.ClickException("spec.pytorchReplicaSpecs: neither Master nor Worker. To fix: add one")
    template = source.table(*replicas, roles[0], "template")
    for role in roles[1:]:
        if source.look(*replicas, role, "template") == template:
            source.take(*replicas, role, "template")
        else:
            said.append(f"{role}'s template differs from {roles[0]}'s, which every pod has now")
    pods = sum(source.whole(*replicas, role, "replicas", default=1) for role in roles)
    elastic = ("spec", "elasticPolicy")
    fewest = source.whole(*elastic, "minReplicas", default=pods)
    most = source.whole(*elastic, "maxReplicas", default=pods)
    spec = _sizes(template, fewest, most, said)
    per_node = source.look("spec", "nprocPerNode")
    if str(per_node) in ("None", "auto", "gpu", str(spec.get("parallelism", {}).get("gpusPerPod", 1))):
        source.take("spec", "nprocPerNode")
    return spec | _policy(source, "spec", "runPolicy"), template


def _policy(source: _Source, *path: str) -> dict[str, Any]:
    """Policy fields that all of the field's operators share."""
    names = ("backoffLimit", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend")
    found = {name: source.take(*path, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _trainer(source: _Source, said: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = ("spec", "trainer")
    container: dict[str, Any] = {"name": "train"}
    for field in ("image", "command", "args", "env"):
        if (value := source.take(*trainer, field)) is not None:
            container[field] = value
    if (resources := source.take(*trainer, "resourcesPerNode")) is not None:
        container["resources"] = resources
    template: dict[str, Any] = {"spec": {"containers": [container]}}
    labels = {k: v for k in ("labels", "annotations") if (v := source.take("spec", k))}
    if labels:
        template["metadata"] = labels
    pods = source.whole(*trainer, "numNodes", default=1)
    processes = source.look(*trainer, "numProcPerNode")
    spec = _sizes(template, pods, pods, said, usual=processes if isinstance(processes, int) else 1)
    if str(processes) in ("None", "auto", "gpu", str(spec.get("parallelism", {}).get("gpusPerPod", 1))):
        source.take(*trainer, "numProcPerNode")
    return spec | _policy(source, "spec"), template


def _ray(source: _Source, said: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    cluster = ("spec", "rayClusterSpec")
    listed = _listed(source.look(*cluster, "workerGroupSpecs"))
    groups = {f"workerGroupSpecs[{n}]": one for n, one in enumerate(listed) if isinstance(one, Mapping)}
    if not groups and isinstance(head := source.take(*cluster, "headGroupSpec"), Mapping):
        groups = {"headGroupSpec": head}  # a cluster without workers trains on its head
    if not groups:
        raise click.ClickException("spec.rayClusterSpec.workerGroupSpecs: no group. To fix: add one")
    (place, group), *others = groups.items()
    workers = _Source({"spec": group})
    template = workers.table("spec", "template")
    pods = workers.whole("spec", "replicas", default=1)
    # Ray's own bounds are those of its autoscaler, from 0 to 2^31-1 where nobody has set them.
    fewest, most = (workers.look("spec", name) for name in ("minReplicas", "maxReplicas"))
    if source.take(*cluster, "enableInTreeAutoscaling") and isinstance(fewest, int) and isinstance(most, int):
        spec = _sizes(template, max(1, fewest), min(most, 1024), said)
    else:
        spec = _sizes(template, pods, pods, said)
    for name in ("minReplicas", "maxReplicas", "groupName"):
        workers.take("spec", name)
    source.take(*cluster, "workerGroupSpecs")
    said += [f"not carried over: {'.'.join((*cluster, place, *path[1:]))}" for path in workers.left()]
    said += [f"not carried over: {'.'.join((*cluster, other))}" for other, _ in others]
    entrypoint = source.take("spec", "entrypoint")
    if isinstance(entrypoint, str):
        containers = _containers(template)
        containers[0] = {**containers[0], "command": _words(entrypoint)}
        containers[0].pop("args", None)
        said.append(
            "spec.entrypoint: every rank runs it, without a Ray cluster. To fix: where it calls ray.init or "
            "Ray Train, have it call torch.distributed, whose environment is set"
        )
    return spec | _policy(source, "spec"), template


def _words(text: str) -> list[str]:
    """The words of a command; where it is more than words, a shell that runs it."""
    if not re.search(r"[|&;<>()$`\n*?]", text):
        try:
            return shlex.split(text)
        except ValueError:
            pass
    return ["sh", "-c", text]


def _adaptdl(source: _Source, said: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    template = source.table("spec", "template")
    fewest = max(1, source.whole("spec", "minReplicas", default=1))
    most = source.whole("spec", "maxReplicas", default=0)
    if source.look("spec", "preemptible") is not False:
        source.take("spec", "preemptible")
    if not most:
        most = max(fewest, 8)
        said.append(f"pipeline.maxStages: {most} stands for no limit. To fix: the most GPUs that it can use")
    return _sizes(template, fewest, most, said), template


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    """The template's containers, each a copy to change. Raises ClickException: there are none."""
    pod = template.get("spec")
    listed = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(one, Mapping) for one in listed):
        raise click.ClickException("a template has no containers. To fix: add the one that trains")
    assert isinstance(pod, Mapping)
    containers = [dict(one) for one in listed]
    template["spec"] = {**pod, "containers": containers}
    return containers


def _asked(container: Mapping[str, Any]) -> list[tuple[str, str]]:
    """GPUs that a container asks for: (limits or requests, the resource's name)."""
    parts = _table(container.get("resources"))
    return [(part, name) for part in parts for name in _table(parts[part]) if GPU.fullmatch(str(name))]


def _sizes(
    template: dict[str, Any], fewest: int, most: int, said: list[str], *, usual: int = 1
) -> dict[str, Any]:
    """``pipeline`` and ``parallelism``; the template's own GPUs are taken out, which Ballast fills in."""
    containers = _containers(template)
    first = next((one for one in containers if _asked(one)), containers[0])
    asked = _asked(first)
    resources = {
        k: dict(v) if isinstance(v, Mapping) else v for k, v in _table(first.get("resources")).items()
    }
    count: Any = None
    for part, name in asked:
        count = resources[part].pop(name)
    said += [
        f"{name}: pods get it in pools with gpuResource: {name}"
        for name in sorted({name for _, name in asked} - {GPU_RESOURCE})
    ]
    if isinstance(first.get("resources"), Mapping):
        first["resources"] = {k: v for k, v in resources.items() if v}
        if not first["resources"]:
            del first["resources"]
    template["spec"]["containers"] = [first, *(one for one in containers if one is not first)]
    gpus = int(str(count)) if str(count).isdecimal() and 0 < len(str(count)) < 5 else usual
    if count is None and usual == 1:
        said.append("no GPU is asked for: each pod has one now")
    gpus = max(1, gpus)
    spec: dict[str, Any] = {"pipeline": {"minStages": fewest * gpus, "maxStages": most * gpus}}
    if gpus > 1:
        spec["parallelism"] = {"gpusPerPod": gpus}
        said.append(f"a pod has {gpus} GPUs: its command is `torchrun` with the script, once for all of them")
    return spec


def _fit_container(
    template: dict[str, Any], spec: dict[str, Any], image: str | None, said: list[str]
) -> None:
    """The first container, which Ballast gives ranks and addresses."""
    first = _containers(template)[0]
    if image is not None:
        first["image"] = image
    if not first.get("image"):
        said.append("image: the manifest leaves it to a runtime. To fix: --image")
    if not first.get("command"):
        said.append(
            "command: the image's own entrypoint is not run. To fix: write it into the first container"
        )
    pod = template["spec"]
    if pod.pop("restartPolicy", None) not in (None, "Never"):
        said.append("the template's restartPolicy: pods start once; restarts are counted by `backoffLimit`")
    words = [str(word) for field in ("command", "args") for word in _listed(first.get(field))]
    flags = [word for word in words if re.match(r"--(nnodes|nproc|node[-_]rank|master|rdzv)", word)]
    if flags:
        said.append(
            f"{' '.join(flags)[:200]}: torchrun reads them from the environment. To fix: take them out"
        )


KINDS = {
    "PyTorchJob": ("kubeflow.org/", _pytorch),
    "TrainJob": ("trainer.kubeflow.org/", _trainer),
    "RayJob": ("ray.io/", _ray),
    "AdaptDLJob": ("adaptdl.petuum.com/", _adaptdl),
}
"""Kind -> (the beginning of its apiVersion, how its spec is read)."""
