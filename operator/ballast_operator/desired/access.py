"""The identity of a job's pods, and the two objects that it may touch."""

from typing import Any

from ballast_operator.api.rbac import trainer_rules
from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Kind
from ballast_operator.views.job import JobView


def trainer_account(job: str) -> str:
    """Name of the service account, the role and the binding of a job's pods."""
    return f"{job}-trainer"


def access_objects(view: JobView) -> tuple[tuple[Kind, dict[str, Any]], ...]:
    """Service account, role and binding: read the job's plan, renew the job's lease, nothing else."""
    name = trainer_account(view.name)
    rules = trainer_rules(view.name)
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": ROLE.kind, "name": name}
    subject = {"kind": SERVICE_ACCOUNT.kind, "name": name, "namespace": view.key[0]}
    return (
        (SERVICE_ACCOUNT, owned(view, SERVICE_ACCOUNT, name)),
        (ROLE, owned(view, ROLE, name, rules=rules)),
        (ROLE_BINDING, owned(view, ROLE_BINDING, name, roleRef=role_ref, subjects=[subject])),
    )
