"""SIGTERM: finish the step, save, leave."""

import signal
import types


class StopSignal:
    """Remembers that this process was told to stop."""

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Listen to SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        self.received = True
