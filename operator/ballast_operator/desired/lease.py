"""The Lease that rank 0 renews; made by the operator, so that pods need no right to create one."""

import math
from typing import Any

from ballast_policies.contract import lease_name

from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import LEASE
from ballast_operator.views.job import JobView


def lease_object(view: JobView, heartbeat_seconds: float) -> dict[str, Any]:
    """The lease that says how long it lasts; all else of it belongs to the trainer."""
    duration = max(1, math.ceil(heartbeat_seconds))
    return owned(view, LEASE, lease_name(view.name), spec={"leaseDurationSeconds": duration})
