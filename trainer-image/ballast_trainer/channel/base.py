"""The interface of the channel between rank 0 and the operator, its messages, and those without Kubernetes.

As files in a directory, for torchrun and for tests, it is one JSON file per message: ``plan.json`` and
``config.json`` are read; ``report.json``, ``proposal.json``, ``ack.json``, ``finished-step`` and
``end-reason`` are written.  Each file is replaced in one rename, so a reader sees whole files.  In a run
without an operator, every repack is granted at once, inside the process.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ballast_policies.contract import CONFIG_KEY, PLAN_KEY, Ack, ContractError, Plan, Proposal, Report
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.model import Model


class ChannelError(RuntimeError):
    """The other side cannot be reached now; training continues and the call is repeated later."""


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


def plan_from(text: str | None, source: object) -> Plan | None:
    """The plan in a text of JSON; None where there is no text. ``source`` is where it was read.

    Raises:
        ChannelError: the text is not a plan.
    """
    try:
        return Plan.from_json(text) if text else None
    except ContractError as error:
        raise ChannelError(f"{source}: {error}") from error


def config_from(text: str | None, source: object) -> Mapping[str, Any] | None:
    """The job's configuration in a text of JSON; None where there is no text. ``source`` as above.

    Raises:
        ChannelError: the text is not a JSON object, or above the contract's limits.
    """
    try:
        return decode_text(dict[str, Any], text, limits=OBJECT) if text else None
    except ContractError as error:
        raise ChannelError(f"{source}: {CONFIG_KEY} cannot be read: {error}") from error


class DirectoryChannel:
    """See :class:`~ballast_trainer.channel.base.Channel`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_plan(self) -> Plan | None:
        """``plan.json``."""
        return plan_from(self._read(PLAN_KEY), self._path / PLAN_KEY)

    def read_config(self) -> Mapping[str, Any] | None:
        """``config.json``."""
        return config_from(self._read(CONFIG_KEY), self._path)

    def close(self) -> None:
        """Nothing runs."""

    def write(self, messages: Messages) -> None:
        """One file for each message given."""
        files: dict[str, Model | None] = {
            "report.json": messages.report,
            "proposal.json": messages.proposal,
            "ack.json": messages.ack,
        }
        for name, message in files.items():
            if message is not None:
                self._replace(name, message.to_json())
        if messages.finished_step is not None:
            self._replace("finished-step", str(messages.finished_step))
        if messages.end_reason is not None:
            self._replace("end-reason", messages.end_reason)

    def publish(self, plan: Plan) -> None:
        """Write ``plan.json``, as the operator would."""
        self._replace(PLAN_KEY, plan.to_json())

    def _read(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChannelError(str(error)) from error

    def _replace(self, name: str, text: str) -> None:
        temporary = self._path / f".{name}.new"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            temporary.replace(self._path / name)
        except OSError as error:
            raise ChannelError(str(error)) from error


class StandaloneChannel:
    """Grants every proposal of the current epoch; see :class:`~ballast_trainer.channel.base.Channel`."""

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
