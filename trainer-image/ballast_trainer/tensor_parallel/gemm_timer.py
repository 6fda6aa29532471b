"""Timer of a rank's matrix products in tensor-parallel layers: M of equation 1."""

import contextlib
import time
from collections.abc import Iterator

import torch

from ballast_trainer.gpu_emulation import EmulatedSpeed


class GemmTimer:
    """Adds up the seconds of products, forward and backward.

    Attributes:
        running: whether products are timed.
        seconds: of this step, multiplied by the emulated slow-down.
        extra: the part that only an emulated straggler adds, which no meter of whole stages measures.
    """

    def __init__(self, device: torch.device, speed: EmulatedSpeed | None = None) -> None:
        """Prepare.

        Args:
            device: where products run; a GPU is synchronised around each while the clock runs.
            speed: the slower device that is emulated: each product is padded to its time there, so that
                the other ranks wait for it where they would.
        """
        self.running = speed is not None
        self.start_step()
        self._device = device
        self._speed = speed.of_products() if speed is not None else None
        self._extra = 1 - 1 / speed.products if speed is not None else 0.0
        one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter

    def start_step(self) -> None:
        """Count from zero."""
        self.seconds = self.extra = 0.0

    def now(self) -> float:
        """Seconds on the clock that products are timed by."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextlib.contextmanager
    def product(self) -> Iterator[None]:
        """Around a product."""
        if not self.running:
            yield
            return
        wall, began = time.perf_counter(), self.now()
        yield
        spent = self.now() - began
        if self._speed is None:
            self.seconds += spent
        else:
            self.seconds += self._speed.factor * spent
            self.extra += self._extra * self._speed.factor * spent
            self._speed.pad(wall, spent)
