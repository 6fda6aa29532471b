"""Kinds of change by their name in the configuration."""

from collections.abc import Callable, Sequence

from ballast_trainer.config import DynamicConfig
from ballast_trainer.dynamics.freezing import Freezing
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.pruning import Pruning
from ballast_trainer.errors import ConfigurationError

DYNAMICS: dict[str, Callable[[DynamicConfig, int], Dynamic]] = {"freezing": Freezing, "pruning": Pruning}


def build_dynamics(configs: Sequence[DynamicConfig], layer_count: int) -> tuple[Dynamic, ...]:
    """The changes of a job.

    Raises:
        ConfigurationError: a kind is unknown.
    """
    for config in configs:
        if config.kind not in DYNAMICS:
            raise ConfigurationError.unknown("dynamics.kind", config.kind, DYNAMICS)
    return tuple(DYNAMICS[config.kind](config, layer_count) for config in configs)
