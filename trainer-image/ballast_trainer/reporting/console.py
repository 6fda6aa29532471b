"""Reporters: print each step and event on rank 0's standard output."""

import json
import logging
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from ballast_trainer.errors import OutputClosed
from ballast_trainer.terminal import ERASE

_BAR = 24
_SHOWN_EVERY_SECONDS = 0.1


def step_words(fields: Mapping[str, Any]) -> list[str]:
    """A step's figures, in the order of a line."""
    sizes = ",".join(str(stage["endLayer"] - stage["firstLayer"]) for stage in fields["stages"])
    words = [f"loss {fields['loss']:.4f}", f"{fields['step_seconds'] * 1000:.0f} ms", f"layers {sizes}"]
    if fields.get("emulated"):
        words.append(f"emulated x{fields['emulated']:g}")
    return words


class ProgressLine:
    """Drawn in place; nothing is left behind when the process ends at once."""

    def __init__(self, total_steps: int, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._lines = _Lines(out)
        self._mark = "━" if (out.encoding or "utf-8").lower().startswith("utf") else "="
        self._clock = clock
        self._done: deque[tuple[float, int]] = deque(maxlen=32)
        self._shown = float("-inf")

    def show(self, fields: Mapping[str, Any]) -> None:
        """Draw the line for the step that is done, unless it was drawn a moment ago."""
        now, step = self._clock(), fields["step"]
        self._done.append((now, step))
        if now - self._shown < _SHOWN_EVERY_SECONDS and step != self._total:
            return
        self._shown = now
        self._lines.print(ERASE + self._drawn(step, fields), end="")

    def left(self) -> str | None:
        """Time to the last step at the speed of the last steps."""
        (first_at, first), (last_at, last) = self._done[0], self._done[-1]
        if last <= first:  # steps since a checkpoint are done again
            return None
        seconds = round((self._total - last) * (last_at - first_at) / (last - first))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"

    def _drawn(self, step: int, fields: Mapping[str, Any]) -> str:
        bar, left = self._mark * (_BAR * step // self._total), self.left()
        words = [f"step {step}/{self._total}", *step_words(fields), *([left] if left else [])]
        # What does not fit would begin another line.
        return " ".join([bar.ljust(_BAR), *words])[: shutil.get_terminal_size().columns - 1]


logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Receives every step and event."""

    def step(self, **fields: Any) -> None:
        """A step is done: ``step``, ``loss``, ``step_seconds``, ``stages``."""

    def event(self, name: str, **fields: Any) -> None:
        """Something happened: launch, migrate, rebalance, repack, checkpoint, finished."""


class SilentReporter:
    """The reporter of all ranks but 0: no output."""

    def step(self, **fields: Any) -> None:
        """Nothing."""

    def event(self, name: str, **fields: Any) -> None:
        """Nothing."""


class JsonReporter:
    """One JSON object a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._lines = _Lines(out if out is not None else sys.stdout)

    def step(self, **fields: Any) -> None:
        """``{"step": ..., "loss": ..., "step_seconds": ..., "stages": [...]}``; ``loss`` may be null."""
        self._lines.print(json.dumps(in_json(fields)))

    def event(self, name: str, **fields: Any) -> None:
        """``{"event": name, ...}``."""
        self._lines.print(json.dumps({"event": name, **in_json(fields)}))


class TextReporter:
    """A line for every event and for one step in 20; on a terminal a progress line."""

    def __init__(self, total_steps: int, out: TextIO | None = None) -> None:
        out = out if out is not None else sys.stdout
        self._lines = _Lines(out)
        self._total = total_steps
        self._line = ProgressLine(total_steps, out) if out.isatty() else None
        self._every = max(1, total_steps // 20)

    def step(self, **fields: Any) -> None:
        """Progress."""
        if self._line is not None:
            self._line.show(fields)
            return
        step = fields["step"]
        if step % self._every and step != self._total:
            return
        text = f"step {step}/{self._total}  {'  '.join(step_words(fields))}"
        self._lines.print(text)

    def event(self, name: str, **fields: Any) -> None:
        """One line."""
        details = "  ".join(f"{key}={_short(value)}" for key, value in fields.items())
        erase = ERASE if self._line is not None else ""
        self._lines.print(f"{erase}{name}  {details}")


def in_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with null for numbers that JSON does not have: a loss may be NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


class _Lines:
    """Lines of an output.  Training goes on where they cannot be written, e.g. to a full disk."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._refused = out, ""

    def print(self, line: str, end: str = "\n") -> None:
        """Write one. Raises OutputClosed: the reader has closed the output."""
        refused = ""
        try:
            print(line, end=end, file=self._out, flush=True)
        except BrokenPipeError as error:
            raise OutputClosed(
                "the reader has closed standard output. To fix: write to a file, or keep the reader open"
            ) from error
        except OSError as error:
            refused = str(error)
            if refused != self._refused:
                logger.warning("standard output cannot be written: %s; training continues without", error)
        self._refused = refused


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
