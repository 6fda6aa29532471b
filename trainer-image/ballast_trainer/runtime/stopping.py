"""SIGTERM: finish the step, save, leave."""

import signal
import types


class StopSignal:
    """Remembers that this process was told to stop."""

    def __init__(self) -> None:
        self.received = False

    def install(self, *, interactive: bool = False) -> None:
        """Listen to SIGTERM from now on; ``interactive`` to the first Ctrl-C too."""
        signal.signal(signal.SIGTERM, self._receive)
        if interactive:
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
