"""The job's Lease as a pass sees it: the trainer's report, proposal and acknowledgement."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    Proposal,
    Report,
    read_end_reason,
    read_finished_step,
)

from ballast_operator.kube.kinds import Object

REFUSAL_SECONDS = 60.0
"""Seconds that a refusal is shown after the last refused message, with the text of the first.

A trainer whose messages are refused may send several a second, each wrong in another way: the operator writes
about it at most twice in this time.
"""

LONGEST_DURATIONS = 10
"""A trainer may not put off by more than this factor when it counts as hung."""

_READERS: dict[str, Callable[[str], Any]] = {
    REPORT_ANNOTATION: Report.from_json,
    PROPOSAL_ANNOTATION: Proposal.from_json,
    ACK_ANNOTATION: Ack.from_json,
    FINISHED_ANNOTATION: read_finished_step,
    END_REASON_ANNOTATION: read_end_reason,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The trainer's side of the contract.

    Attributes:
        quiet_seconds: since this operator last saw ``renewTime`` change (own clock).
        finished_step: the last step, once training is done.
        end_reason: why that is before the last step of the job's configuration; None: it is not.
        released: its holder has given it up, and renews it no more.
        duration_seconds: after which it counts as not renewed, as it says; None: it does not say.
        refused: a message that cannot be used, by annotation, and why; empty: all can.
    """

    quiet_seconds: float = 0.0
    report: Report | None = None
    proposal: Proposal | None = None
    ack: Ack | None = None
    finished_step: int | None = None
    end_reason: str | None = None
    released: bool = False
    refused: str = ""
    duration_seconds: float | None = None

    def duration(self, heartbeat_seconds: float) -> float:
        """Seconds that it lasts without a renewal; ``heartbeat_seconds``: of a lease that is made now.

        What it says counts, as its trainer was started with that: up to ten times what a new one says.
        """
        if self.duration_seconds is None:
            return heartbeat_seconds
        return min(self.duration_seconds, LONGEST_DURATIONS * heartbeat_seconds)


class LeaseReader:
    """Reads one Lease again and again: where a message cannot be used, the last good one stays in force."""

    def __init__(self) -> None:
        self._version: tuple[str, str] = ("", "")
        self._renewed: tuple[object, float] | None = None
        self._texts: dict[str, str] = {}
        self._messages: dict[str, Any] = {}
        self._bad: set[str] = set()
        self._refused = ""
        self._refused_at = 0.0

    def read(self, item: Object, *, now: float) -> LeaseView:
        """The Lease at ``now``, in seconds of a clock that never goes back."""
        metadata = item["metadata"]
        version = (metadata.get("uid", ""), metadata.get("resourceVersion", ""))
        if version[0] != self._version[0]:  # another Lease of this name
            self._texts, self._messages, self._bad = {}, {}, set()
            self._refused = ""
        if version != self._version:
            self._version = version
            self._take_in(metadata.get("annotations") or {}, now)
        spec = item.get("spec") or {}
        if not self._bad and now - self._refused_at >= REFUSAL_SECONDS:
            self._refused = ""
        return LeaseView(
            quiet_seconds=self.quiet_seconds(item, now=now),
            report=self._messages.get(REPORT_ANNOTATION),
            proposal=self._messages.get(PROPOSAL_ANNOTATION),
            ack=self._messages.get(ACK_ANNOTATION),
            finished_step=self._messages.get(FINISHED_ANNOTATION),
            end_reason=self._messages.get(END_REASON_ANNOTATION),
            released=bool(spec.get("renewTime")) and not spec.get("holderIdentity"),
            duration_seconds=_seconds(spec.get("leaseDurationSeconds")),
            refused=self._refused,
        )

    def quiet_seconds(self, item: Object, *, now: float) -> float:
        """Since the trainer's renewal was first seen; called with each change, it is noted at once."""
        seen = (item["metadata"].get("uid", ""), (item.get("spec") or {}).get("renewTime"))
        if self._renewed is None or self._renewed[0] != seen:
            self._renewed = (seen, now)
        return now - self._renewed[1]

    def _take_in(self, annotations: Object, now: float) -> None:
        for name, reader in _READERS.items():
            text = annotations.get(name)
            if self._texts.get(name) == text:
                continue  # read, or refused, before
            self._bad.discard(name)
            if text is None:
                del self._texts[name]
                self._messages.pop(name, None)
                continue
            self._texts[name] = text
            try:
                self._messages[name] = reader(text)
            except ContractError as error:
                self._bad.add(name)
                self._refused_at = now
                self._refused = self._refused or f"annotation {name}: {error}"


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int) and value > 0 else None
