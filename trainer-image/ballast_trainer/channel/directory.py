"""The channel as files in a directory, for torchrun and for tests: one JSON file per message.

``plan.json`` and ``config.json`` are read; ``report.json``, ``proposal.json``, ``ack.json`` and
``finished-step`` are written.  Each file is replaced in one rename, so a reader sees whole files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract import CONFIG_KEY, PLAN_KEY, Ack, ContractError, Plan, Proposal, Report
from ballast_policies.contract.wire import Wire

from ballast_trainer.channel.base import ChannelError


class DirectoryChannel:
    """See :class:`~ballast_trainer.channel.base.Channel`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_plan(self) -> Plan | None:
        """``plan.json``."""
        text = self._read(PLAN_KEY)
        if text is None:
            return None
        try:
            return Plan.from_json(text)
        except ContractError as error:
            raise ChannelError(f"{self._path / PLAN_KEY}: {error}") from error

    def read_config(self) -> Mapping[str, Any] | None:
        """``config.json``."""
        text = self._read(CONFIG_KEY)
        if text is None:
            return None
        try:
            config: Mapping[str, Any] = json.loads(text)
        except ValueError as error:
            raise ChannelError(f"{self._path / CONFIG_KEY}: {error}") from error
        return config

    def write(
        self,
        *,
        report: Report | None = None,
        proposal: Proposal | None = None,
        ack: Ack | None = None,
        finished_step: int | None = None,
    ) -> None:
        """One file for each message given."""
        messages: dict[str, Wire | None] = {
            "report.json": report,
            "proposal.json": proposal,
            "ack.json": ack,
        }
        for name, message in messages.items():
            if message is not None:
                self._replace(name, message.to_json())
        if finished_step is not None:
            self._replace("finished-step", str(finished_step))

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
