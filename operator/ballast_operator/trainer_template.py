"""Fields of every template that an administrator fills in where a job does not (chart: ``trainer``)."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ballast_operator.api.template import PodTemplate

VARIABLE = "BALLAST_TRAINER_TEMPLATE"
"""A PodTemplateSpec as JSON, with one container."""

_NAMED = {"env": "name", "ports": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name"}


@functools.cache
def trainer_template() -> Mapping[str, Any]:
    """This process's template, empty where there is none. Raises ValueError: why it is none."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        template = PodTemplate.model_validate_json(text).as_object()
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{VARIABLE}: {error}. To fix: a PodTemplateSpec as JSON") from error
    if len(template["spec"]["containers"]) != 1 or "initContainers" in template["spec"]:
        raise ValueError(f"{VARIABLE}: one container, the trainer. To fix: leave the others out")
    return template


def filled_in(template: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """A job's template with what it leaves out: what it has itself always wins.

    Lists of the trainer are joined by name, its security context by field; a volume comes only where the
    trainer mounts it in the end. ``usual``: what is filled in; empty: nothing.
    """
    if not usual:
        return dict(template)
    spec, other = template["spec"], usual["spec"]
    metadata, others = template.get("metadata") or {}, usual.get("metadata") or {}
    trainer = _joined(spec["containers"][0], other["containers"][0])
    mounted = {mount.get("name") for mount in trainer.get("volumeMounts") or ()}
    own = {volume.get("name") for volume in spec.get("volumes") or ()}
    volumes = [*(spec.get("volumes") or ())]
    volumes += [v for v in other.get("volumes") or () if v.get("name") in mounted - own]
    whole = _joined(
        spec, {key: value for key, value in other.items() if key not in ("containers", "volumes")}
    )
    return {
        "metadata": {
            part: {**(others.get(part) or {}), **(metadata.get(part) or {})}
            for part in ("labels", "annotations")
        },
        "spec": {
            **whole,
            "containers": [trainer, *spec["containers"][1:]],
            **({"volumes": volumes} if volumes else {}),
        },
    }


def _joined(own: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both; those of ``own`` win, lists of named things and requests are joined."""
    result = {**usual, **own}
    for field, key in _NAMED.items():
        if field in own and field in usual:
            result[field] = _by(key, own[field] or (), usual[field] or ())
    if isinstance(own.get("securityContext"), Mapping) and "securityContext" in usual:
        result["securityContext"] = {**usual["securityContext"], **own["securityContext"]}
    if "resources" in own and "resources" in usual:
        mine, theirs = own["resources"] or {}, usual["resources"] or {}
        parts = {part: {**(theirs.get(part) or {}), **(mine.get(part) or {})} for part in {*mine, *theirs}}
        result["resources"] = parts
    return result


def _by(key: str, own: Sequence[Mapping[str, Any]], usual: Sequence[Mapping[str, Any]]) -> list[Any]:
    taken = {item.get(key) for item in own}
    return [*own, *(item for item in usual if item.get(key) not in taken)]
