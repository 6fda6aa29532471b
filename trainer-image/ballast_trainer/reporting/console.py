"""Reporters: what happens to each step and event on rank 0's standard output."""

import json
import sys
from typing import Any, Protocol, TextIO


class Reporter(Protocol):
    """Told of every step and event."""

    def step(self, **fields: Any) -> None:
        """A step is done: ``step``, ``loss``, ``step_seconds``, ``stages``."""

    def event(self, name: str, **fields: Any) -> None:
        """Something happened: launch, migrate, rebalance, repack, checkpoint, finished."""


class SilentReporter:
    """Every rank but 0."""

    def step(self, **fields: Any) -> None:
        """Nothing."""

    def event(self, name: str, **fields: Any) -> None:
        """Nothing."""


class JsonReporter:
    """One JSON object a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout

    def step(self, **fields: Any) -> None:
        """``{"step": ..., "loss": ..., "step_seconds": ..., "stages": [...]}``."""
        print(json.dumps(fields), file=self._out, flush=True)

    def event(self, name: str, **fields: Any) -> None:
        """``{"event": name, ...}``."""
        print(json.dumps({"event": name, **fields}), file=self._out, flush=True)


class TextReporter:
    """A line for every event, and for a step now and then; on a terminal one line that moves."""

    def __init__(self, total_steps: int, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._total = total_steps
        self._moving = self._out.isatty()
        self._every = 1 if self._moving else max(1, total_steps // 20)

    def step(self, **fields: Any) -> None:
        """Progress."""
        step = fields["step"]
        if step % self._every and step != self._total:
            return
        sizes = ",".join(str(stage["endLayer"] - stage["firstLayer"]) for stage in fields["stages"])
        emulated = f"  emulated x{fields['emulated']:g}" if fields.get("emulated") else ""
        text = (
            f"step {step}/{self._total}  loss {fields['loss']:.4f}  "
            f"{fields['step_seconds'] * 1000:.0f} ms  layers {sizes}{emulated}"
        )
        print(
            f"\r\x1b[K{text}" if self._moving else text,
            end="" if self._moving else "\n",
            file=self._out,
            flush=True,
        )

    def event(self, name: str, **fields: Any) -> None:
        """One line."""
        details = "  ".join(f"{key}={_short(value)}" for key, value in fields.items())
        print(
            f"\r\x1b[K{name}  {details}" if self._moving else f"{name}  {details}", file=self._out, flush=True
        )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
