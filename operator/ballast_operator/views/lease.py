"""The job's Lease as a pass sees it: the trainer's report, proposal and acknowledgement."""

import dataclasses
from typing import TypeVar

from ballast_policies.contract import (
    ACK_ANNOTATION,
    FINISHED_ANNOTATION,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    ContractError,
    Proposal,
    Report,
)

from ballast_operator.kube.kinds import Object

M = TypeVar("M", Ack, Proposal, Report)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The trainer's side of the contract.

    Attributes:
        quiet_seconds: since this operator last saw ``renewTime`` change (own clock).
        finished_step: the last step, once training is done.
        problems: annotations that cannot be read, as text.
    """

    quiet_seconds: float = 0.0
    report: Report | None = None
    proposal: Proposal | None = None
    ack: Ack | None = None
    finished_step: int | None = None
    problems: tuple[str, ...] = ()


def read_lease(item: Object, *, quiet_seconds: float) -> LeaseView:
    """A lease from its JSON; what cannot be read is left out and named in ``problems``."""
    annotations = item["metadata"].get("annotations") or {}
    problems: list[str] = []

    def read(kind: type[M], name: str) -> M | None:
        if name not in annotations:
            return None
        try:
            return kind.from_json(annotations[name])
        except ContractError as error:
            problems.append(f"annotation {name}: {error}")
            return None

    finished = annotations.get(FINISHED_ANNOTATION)
    if finished is not None and not finished.isdecimal():
        problems.append(f"annotation {FINISHED_ANNOTATION}: expected a decimal, got {finished!r}")
        finished = None
    return LeaseView(
        quiet_seconds=quiet_seconds,
        report=read(Report, REPORT_ANNOTATION),
        proposal=read(Proposal, PROPOSAL_ANNOTATION),
        ack=read(Ack, ACK_ANNOTATION),
        finished_step=None if finished is None else int(finished),
        problems=tuple(problems),
    )
