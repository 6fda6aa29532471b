"""The Lease that rank 0 renews; made by the operator, so that pods need no right to create one."""

from typing import Any

from ballast_policies.contract import lease_name

from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import LEASE
from ballast_operator.views.job import JobView


def lease_object(view: JobView) -> dict[str, Any]:
    """The empty lease; its spec and annotations belong to the trainer."""
    return owned(view, LEASE, lease_name(view.name))
