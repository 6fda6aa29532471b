"""The newest plan of a job that could be read."""

import dataclasses

from ballast_policies.contract import Plan

from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A job's newest plan.

    Attributes:
        job_uid: of which job of this name.
        written: when.
        config: the trainer's configuration beside it, as JSON.
        version: uid and resourceVersion of the ConfigMap that it was read from.
        intact: whether the ConfigMap still has it.
    """

    job_uid: str
    plan: Plan
    written: Time
    config: str
    version: str
    intact: bool = True
