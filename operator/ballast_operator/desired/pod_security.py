"""The security context of trainer pods: Kubernetes' profile `restricted`, where the template says nothing.

Each field is filled in by itself, so that a template overrides one without losing the others. What has the
wrong type is left as it is: the API server names it.
"""

from collections.abc import Mapping
from typing import Any

TRAINER_GROUP = 65532
"""Group of the user in Ballast's images; volumes are made writable for it."""

_CONTEXT = "securityContext"
_CAPABILITIES = "capabilities"
_ROOT = 0
_POD_DEFAULTS = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    # Checkpoint volumes belong to root when they are made.
    "fsGroup": TRAINER_GROUP,
    "fsGroupChangePolicy": "OnRootMismatch",
}
_NEEDS_ESCALATION = ("SYS_ADMIN", "CAP_SYS_ADMIN", "ALL")


def restricted(content: dict[str, Any]) -> dict[str, Any]:
    """The PodSpec with the fields that the profile `restricted` asks for, except where it sets them.

    A container that asks for more (``privileged``, ``SYS_ADMIN``, user 0) keeps what it asks for; Pod
    Security admission decides whether the namespace allows it.
    """
    lists = {
        name: [_container(one) for one in content[name]]
        for name in ("initContainers", "containers")
        if isinstance(content.get(name), list | tuple)
    }
    return {**_filled(content, _CONTEXT, _not_as_root(content, _POD_DEFAULTS)), **lists}


def _container(container: Any) -> Any:
    if not isinstance(container, Mapping):
        return container
    own = container.get(_CONTEXT) or {}
    if not isinstance(own, Mapping):
        return container
    capabilities = own.get(_CAPABILITIES)
    added = capabilities.get("add") if isinstance(capabilities, Mapping) else ()
    added = added if isinstance(added, list | tuple) else ()
    defaults: dict[str, Any] = {}
    # The API server refuses allowPrivilegeEscalation: false beside either of these.
    if not own.get("privileged") and not any(one in _NEEDS_ESCALATION for one in added):
        defaults["allowPrivilegeEscalation"] = False
    if own.get("runAsUser") == _ROOT:
        defaults["runAsNonRoot"] = False
    filled = {**defaults, **_filled(own, _CAPABILITIES, {"drop": ["ALL"]})}
    return {**container, _CONTEXT: filled}


def _not_as_root(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    own = content.get(_CONTEXT)
    as_root = isinstance(own, Mapping) and own.get("runAsUser") == _ROOT
    return {**defaults, "runAsNonRoot": not as_root}


def _filled(owner: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``owner`` with the mapping called ``name`` completed by ``defaults``."""
    given = owner.get(name)
    if given is not None and not isinstance(given, Mapping):
        return dict(owner)
    return {**owner, name: {**defaults, **(given or {})}}
