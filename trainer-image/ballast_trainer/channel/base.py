"""The interface of the channel between rank 0 and the operator, its messages, and those without Kubernetes.

As files in a directory, for torchrun and for tests, it is one JSON file per message: ``plan.json`` and
``config.json`` are read; ``report.json``, ``proposal.json``, ``ack.json``, ``finished-step`` and
``end-reason`` are written.  Each file is replaced in one rename, so a reader sees whole files.  In a run
without an operator, every repack is granted at once, inside the process.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ballast_client.api_server import ChannelError, RequestRefused
from ballast_client.channels import Directory, Kubernetes
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    CONFIG_KEY,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    PLAN_KEY,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    Proposal,
    Report,
)
from ballast_policies.contract.plan import Plan

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages of rank 0, at most one of a kind; None: none of that kind.

    Attributes:
        report: the newest figures.
        proposal: an offer of ranks.
        ack: the plan that all ranks train under.
        finished_step: the last step, once the job has finished.
        end_reason: why that is before the last step of its configuration.
        closing: nothing follows; the Lease is given up.
    """

    report: Report | None = None
    proposal: Proposal | None = None
    ack: Ack | None = None
    finished_step: int | None = None
    end_reason: str | None = None
    closing: bool | None = None

    def replaced_by(self, newer: "Messages") -> "Messages":
        """These messages, where ``newer`` has none of the kind, else its own."""
        fields = (field.name for field in dataclasses.fields(newer))
        given = {name: getattr(newer, name) for name in fields if getattr(newer, name) is not None}
        return dataclasses.replace(self, **given)

    @property
    def annotations(self) -> dict[str, str]:
        """Texts of those given, by the Lease's annotation."""
        messages = {
            REPORT_ANNOTATION: self.report,
            PROPOSAL_ANNOTATION: self.proposal,
            ACK_ANNOTATION: self.ack,
        }
        texts = {key: message.to_json() for key, message in messages.items() if message is not None}
        if self.finished_step is not None:
            texts[FINISHED_ANNOTATION] = str(self.finished_step)
        if self.end_reason is not None:
            texts[END_REASON_ANNOTATION] = self.end_reason
        return texts


class Channel(Protocol):
    """Plans come in; reports, proposals and acknowledgements go out."""

    def read_plan(self) -> Plan | None:
        """The newest plan, or None while there is none. Raises ChannelError: it cannot be read now."""

    def read_config(self) -> Mapping[str, Any] | None:
        """The job's configuration; None while there is none. Raises ChannelError: it cannot be read now."""

    def write(self, messages: Messages) -> None:
        """Write the messages given, and renew the lease, which shows that rank 0 is alive.

        Raises:
            ChannelError: they cannot be written now.
        """

    def close(self) -> None:
        """End what runs beside the calls; the next call begins it anew."""


class OperatorChannel:
    """The contract's messages as texts of the client's channel; see :class:`Channel`."""

    def __init__(self, texts: Directory | Kubernetes) -> None:
        self._texts = texts
        self._refused = False

    def read_plan(self) -> Plan | None:
        """``plan.json``."""
        text = self._texts.read(PLAN_KEY)
        try:
            return Plan.from_json(text) if text else None
        except ContractError as error:
            raise ChannelError(f"{self._texts}: {PLAN_KEY}: {error}") from error

    def read_config(self) -> Mapping[str, Any] | None:
        """``config.json``."""
        text = self._texts.read(CONFIG_KEY)
        try:
            return decode_text(dict[str, Any], text, limits=OBJECT) if text else None
        except ContractError as error:
            raise ChannelError(f"{self._texts}: {CONFIG_KEY} cannot be read: {error}") from error

    def write(self, messages: Messages) -> None:
        """A text for each message given; where they are too long, a report without its figures of layers."""
        try:
            self._texts.write(messages.annotations, release=bool(messages.closing))
        except RequestRefused as error:
            if messages.report is None:
                raise
            brief = dataclasses.replace(messages, report=messages.report.without_layers())
            self._texts.write(brief.annotations, release=bool(messages.closing))
            if not self._refused:
                logger.warning("%s; the operator is told nothing of single layers", error)
            self._refused = True

    def close(self) -> None:
        """End what runs."""
        self._texts.close()


class DirectoryChannel(OperatorChannel):
    """The one of files."""

    def __init__(self, path: Path) -> None:
        self._directory = Directory(path)
        super().__init__(self._directory)

    def publish(self, plan: Plan) -> None:
        """Write ``plan.json``, as the operator would."""
        self._directory.replace(PLAN_KEY, plan.to_json())


class StandaloneChannel:
    """Grants every proposal of the current epoch; see :class:`Channel`."""

    def __init__(self, plan: Plan, growth: Callable[[Plan], Plan] = lambda plan: plan) -> None:
        """``growth`` of the plan in force returns the one by which ranks that are back join, or it itself."""
        self._plan, self._growth = plan, growth
        self._newest = plan

    def read_plan(self) -> Plan | None:
        """The launch's plan, the last granted one, or one that grows it."""
        self._newest = self._growth(self._plan)
        return self._newest

    def read_config(self) -> Mapping[str, Any] | None:
        """None: the configuration comes from the command line."""
        return None

    def follow(self, plan: Plan) -> None:
        """Ranks were lost: those that are left go on by this one."""
        self._plan = self._newest = plan

    def close(self) -> None:
        """Nothing runs."""

    def write(self, messages: Messages) -> None:
        """Answer a proposal with the plan it asks for."""
        if messages.ack is not None and messages.ack.epoch == self._newest.epoch:
            self._plan = self._newest
        proposal = messages.proposal
        if proposal is not None and proposal.epoch == self._plan.epoch:
            self._plan = self._plan.shrink(proposal)
