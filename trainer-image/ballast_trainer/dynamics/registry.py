"""Kinds of change by their name in the configuration."""

from collections.abc import Callable, Sequence

from ballast_trainer.config import DynamicConfig
from ballast_trainer.dynamics.block_change import BlockChange
from ballast_trainer.dynamics.early_exit import EarlyExit
from ballast_trainer.dynamics.freezing import Freezing
from ballast_trainer.dynamics.mixture_of_depths import MixtureOfDepths
from ballast_trainer.dynamics.mixture_of_experts import MixtureOfExperts
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.pruning import Pruning
from ballast_trainer.dynamics.sparse_attention import SparseAttention
from ballast_trainer.errors import ConfigurationError

DYNAMICS: dict[str, Callable[[DynamicConfig, int], Dynamic]] = {
    "earlyExit": EarlyExit,
    "freezing": Freezing,
    "mixtureOfDepths": MixtureOfDepths,
    "mixtureOfExperts": MixtureOfExperts,
    "pruning": Pruning,
    "sparseAttention": SparseAttention,
}


def build_dynamics(
    configs: Sequence[DynamicConfig], layer_count: int, family: str = "transformer"
) -> tuple[Dynamic, ...]:
    """The changes of a job.

    Raises:
        ConfigurationError: a kind is unknown, needs a transformer, or two wrap the same blocks.
    """
    for config in configs:
        if config.kind not in DYNAMICS:
            raise ConfigurationError.unknown("dynamics.kind", config.kind, DYNAMICS)
    built = tuple(DYNAMICS[config.kind](config, layer_count) for config in configs)
    for config, dynamic in zip(configs, built, strict=True):
        if isinstance(dynamic, BlockChange) and family != "transformer":
            reason = f"{config.kind!r} changes transformer blocks; the model's family is {family!r}"
            raise ConfigurationError("dynamics.kind", reason)
    kinds = {config.kind for config in configs}
    if {"earlyExit", "mixtureOfDepths"} <= kinds:
        raise ConfigurationError(
            "dynamics", "earlyExit and mixtureOfDepths both route positions around blocks"
        )
    return built
