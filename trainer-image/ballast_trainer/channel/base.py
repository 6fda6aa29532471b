"""The channel between rank 0 and whoever decides over its pods."""

from collections.abc import Mapping
from typing import Any, Protocol

from ballast_policies.contract import Ack, Plan, Proposal, Report


class ChannelError(RuntimeError):
    """The other side cannot be reached now; training goes on and the call is made again later."""


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

    def write(
        self,
        *,
        report: Report | None = None,
        proposal: Proposal | None = None,
        ack: Ack | None = None,
        finished_step: int | None = None,
    ) -> None:
        """Write what is given, and renew the lease: rank 0 is alive.

        Raises:
            ChannelError: it cannot be written now.
        """
