"""The progress line on a terminal: bar, loss, speed, time left, and layers by stage."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

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
    """Drawn with rich, in place; nothing is left behind when the process ends at once."""

    ERASE = "\r\x1b[K"

    def __init__(
        self,
        total_steps: int,
        out: TextIO,
        *,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self._total = total_steps
        self._out = out
        self._clock = clock
        self._console = Console(file=out, force_terminal=True, width=width)
        self._done: deque[tuple[float, int]] = deque(maxlen=32)
        self._shown = float("-inf")

    def show(self, fields: Mapping[str, Any]) -> None:
        """Draw the line for the step that is done, unless it was drawn a moment ago."""
        now, step = self._clock(), fields["step"]
        self._done.append((now, step))
        if now - self._shown < _SHOWN_EVERY_SECONDS and step != self._total:
            return
        self._shown = now
        self._out.write(self.ERASE + self._drawn(step, fields))
        self._out.flush()

    def left(self) -> str | None:
        """Time to the last step at the speed of the last steps."""
        (first_at, first), (last_at, last) = self._done[0], self._done[-1]
        if last == first:
            return None
        seconds = round((self._total - last) * (last_at - first_at) / (last - first))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"

    def _drawn(self, step: int, fields: Mapping[str, Any]) -> str:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line = Table.grid(padding=(0, 1))
        left = self.left()
        words = [f"step {step}/{self._total}", *step_words(fields), *([left] if left else [])]
        for _ in range(1 + len(words)):
            line.add_column(no_wrap=True)
        line.add_row(ProgressBar(total=self._total, completed=step, width=_BAR), *words)
        with self._console.capture() as capture:
            self._console.print(line, end="")
        return capture.get().rstrip("\n")
