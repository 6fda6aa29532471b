"""The interface of the channel between rank 0 and the operator, and its messages."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from ballast_policies.contract import CONFIG_KEY, Ack, ContractError, Plan, Proposal, Report
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT


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
        """The newest plan, or None while there is none.

        Raises:
            ChannelError: it cannot be read now.
        """

    def read_config(self) -> Mapping[str, Any] | None:
        """The job's configuration, or None while there is none.

        Raises:
            ChannelError: it cannot be read now.
        """

    def write(self, messages: Messages) -> None:
        """Write the messages given, and renew the lease, which shows that rank 0 is alive.

        Raises:
            ChannelError: they cannot be written now.
        """

    def close(self) -> None:
        """End what runs beside the calls; they stay possible."""


def plan_from(text: str | None, source: object) -> Plan | None:
    """The plan in a text; None where there is no text.

    Args:
        text: JSON.
        source: where it was read, for the message.

    Raises:
        ChannelError: the text is not a plan.
    """
    try:
        return Plan.from_json(text) if text else None
    except ContractError as error:
        raise ChannelError(f"{source}: {error}") from error


def config_from(text: str | None, source: object) -> Mapping[str, Any] | None:
    """The job's configuration in a text; None where there is no text.

    Args:
        text: JSON.
        source: where it was read, for the message.

    Raises:
        ChannelError: the text is not a JSON object, or above the contract's limits.
    """
    try:
        return decode_text(dict[str, Any], text, limits=OBJECT) if text else None
    except ContractError as error:
        raise ChannelError(f"{source}: {CONFIG_KEY} cannot be read: {error}") from error
