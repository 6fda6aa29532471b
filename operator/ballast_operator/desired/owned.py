"""What every object of a job carries: its name, labels, and the job as owner."""

from typing import Any

from ballast_policies.contract import JOB_LABEL

from ballast_operator.kube.kinds import JOB, Kind
from ballast_operator.views.job import JobView

MANAGED_BY = {"app.kubernetes.io/managed-by": "ballast-operator"}


def owned(view: JobView, kind: Kind, name: str, **content: Any) -> dict[str, Any]:
    """An object of the job; the garbage collector deletes it with the job, with or without an operator."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "namespace": view.key[0],
            "name": name,
            "labels": {JOB_LABEL: view.name, **MANAGED_BY},
            "ownerReferences": [
                {
                    "apiVersion": JOB.api_version,
                    "kind": JOB.kind,
                    "name": view.name,
                    "uid": view.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        **content,
    }
