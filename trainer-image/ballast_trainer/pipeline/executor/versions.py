"""Versions of a stage's weights: the newest in its parameters, older ones beside them while needed.

A microbatch computes with the parameters of its version, put in the place of the module's, so that
its backward finds the weights of its forward however often the stage was updated in between.  The
newest version shares its memory with the parameters; before an update these move to a copy if the
version is still needed.  So there is exactly one copy of each version held.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn


class WeightVersions:
    """The weights of one stage in one run of a schedule.

    Attributes:
        newest: the newest version; version v is the weights after v updates of the run.
        most_held: the most versions that were held at once.
    """

    def __init__(self, modules: Iterable[nn.Module], uses: Iterable[int]) -> None:
        """Begin with version 0, the present weights of the modules.

        Args:
            modules: the layers of the stage.
            uses: the version of each microbatch that this rank will compute, in any order.
        """
        self._places = [
            (owner, name, parameter)
            for module in modules
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        self._uses = Counter(uses)
        self.newest = 0
        self._held = {0: self._alias()}
        self.most_held = 1

    def _alias(self) -> list[nn.Parameter]:
        return [
            nn.Parameter(live.data, requires_grad=live.requires_grad) if live.requires_grad else live
            for _, _, live in self._places
        ]

    @contextlib.contextmanager
    def in_place(self, version: int) -> Iterator[None]:
        """Let the modules compute with ``version``."""
        for (owner, name, _), parameter in zip(self._places, self._held[version], strict=True):
            _put(owner, name, parameter)
        try:
            yield
        finally:
            for owner, name, live in self._places:
                _put(owner, name, live)

    def done(self, version: int) -> None:
        """Count a microbatch of ``version`` as done."""
        self._gather(version)
        self._uses[version] -= 1
        self._let_go()

    def forget(self, uses: Iterable[int]) -> None:
        """Microbatches of these versions will not be computed after all."""
        self._uses.subtract(uses)
        self._let_go()

    def update(self, apply_gradients: Callable[[], None]) -> None:
        """Make the next version: ``apply_gradients`` updates the parameters from their gradients."""
        if self._uses[self.newest] > 0:
            for _, _, live in self._places:
                if live.requires_grad:
                    live.data = live.data.clone()
        else:
            del self._held[self.newest]
        apply_gradients()
        self.newest += 1
        self._held[self.newest] = self._alias()
        self.most_held = max(self.most_held, len(self._held))

    def _gather(self, version: int) -> None:
        """Add a version's gradients to those of the parameters."""
        for (_, _, live), parameter in zip(self._places, self._held[version], strict=True):
            if parameter.grad is not None and parameter is not live:
                live.grad = parameter.grad if live.grad is None else live.grad.add_(parameter.grad)
                parameter.grad = None

    def _let_go(self) -> None:
        gone = [v for v in self._held if v != self.newest and self._uses[v] <= 0]
        for version in gone:
            del self._held[version]


def _put(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(owner).__setattr__ is nn.Module.__setattr__:
        owner._parameters[name] = parameter
    else:
        # Recurrent modules keep a second list of their weights, which their own setter follows.
        setattr(owner, name, parameter)
