"""The channel as files in a directory, for torchrun and for tests: one JSON file per message.

``plan.json`` and ``config.json`` are read; ``report.json``, ``proposal.json``, ``ack.json``,
``finished-step`` and ``end-reason`` are written.  Each file is replaced in one rename, so a reader sees whole
files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract import CONFIG_KEY, PLAN_KEY, Plan
from ballast_policies.contract.model import Model

from ballast_trainer.channel.base import ChannelError, Messages, config_from, plan_from


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
