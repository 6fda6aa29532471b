"""Construction of the dynamic cases that a configuration names."""

from collections.abc import Sequence

from ballast_policies.contract.job import DynamicConfig
from ballast_policies.planning.dynamics import DYNAMICS, DynamicCase, excluded_pair
from ballast_policies.registry import RegistryError

from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.registry import load_callable


def find_dynamic(kind: str) -> DynamicCase:
    """The row of ``kind``.

    Raises:
        ConfigurationError: it is unknown, or the distribution that registers it is broken.
    """
    try:
        return DYNAMICS.find(kind)
    except RegistryError as error:
        raise ConfigurationError("dynamics.kind", str(error)) from error


def build_dynamics(
    configs: Sequence[DynamicConfig], layer_count: int, family: str = "transformer"
) -> tuple[Dynamic, ...]:
    """The changes of a job.

    Raises:
        ConfigurationError: a kind is unknown, cannot be built, does not suit the model or excludes another.
    """
    for config in configs:
        families = find_dynamic(config.kind).families
        if families and family not in families:
            reason = (
                f"{config.kind!r} changes models of the family {', '.join(sorted(families))}; "
                f"this model's family is {family!r}"
            )
            raise ConfigurationError("dynamics.kind", reason)
    pair = excluded_pair(config.kind for config in configs)
    if pair is not None:
        raise ConfigurationError(
            "dynamics",
            f"{pair[0]} and {pair[1]} exclude each other: {pair[2]}. To fix: leave one of them out",
        )
    return tuple(build_dynamic(config, layer_count) for config in configs)


def build_dynamic(config: DynamicConfig, layer_count: int) -> Dynamic:
    """One change.

    Raises:
        ConfigurationError: its kind is unknown, or names a callable that cannot be imported.
    """
    build = load_callable(f"dynamics[{config.kind}]", find_dynamic(config.kind).build)
    built: Dynamic = build(config, layer_count)
    return built
