"""Construction of the dynamic cases that a configuration names, and whether they suit its model."""

import logging
from collections.abc import Sequence

from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.planning.dynamics import DYNAMICS, DynamicCase, excluded_pair
from ballast_policies.registry import RegistryError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ballast_trainer.data.sources import ShuffledDataset
from ballast_trainer.dynamics.freezing import most_frozen
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.blocks import Lacking, described
from ballast_trainer.models.protocol import Model, layer_without_memory
from ballast_trainer.models.registry import load_callable

logger = logging.getLogger(__name__)

_CUSTOM = "custom"
"""Family of models that name none: their layers tell what they are."""


def find_dynamic(kind: str) -> DynamicCase:
    """The row of ``kind``. Raises ConfigurationError: unknown, or its distribution is broken."""
    try:
        return DYNAMICS.find(kind)
    except RegistryError as error:
        raise ConfigurationError("dynamics.kind", str(error)) from error


def build_dynamics(
    configs: Sequence[DynamicConfig], layer_count: int, family: str = "transformer"
) -> tuple[Dynamic, ...]:
    """The changes of a job, in the order in which they prepare a layer.

    Raises:
        ConfigurationError: a kind is unknown, cannot be built, does not suit the model or excludes another.
    """
    for config in configs:
        families = find_dynamic(config.kind).families
        if families and family not in {*families, _CUSTOM}:
            reason = (
                f"{config.kind!r} changes models of the family {', '.join(sorted(families))}; "
                f"this model's family is {family!r}. To fix: leave it out, or another model"
            )
            raise ConfigurationError("dynamics.kind", reason)
    pair = excluded_pair(config.kind for config in configs)
    if pair is not None:
        raise ConfigurationError(
            "dynamics",
            f"{pair[0]} and {pair[1]} exclude each other: {pair[2]}. To fix: leave one of them out",
        )
    return tuple(sorted((build_dynamic(config, layer_count) for config in configs), key=lambda d: d.order))


def build_dynamic(config: DynamicConfig, layer_count: int) -> Dynamic:
    """One change. Raises ConfigurationError: its kind is unknown, or its callable cannot be imported."""
    build = load_callable(f"dynamics[{config.kind}]", find_dynamic(config.kind).build)
    built: Dynamic = build(config, layer_count)
    # An object of another distribution need not let itself be changed.
    if isinstance(built, Dynamic):
        built.kind = config.kind
    return built


def check_dynamics(model: Model, configs: Sequence[DynamicConfig]) -> None:
    """Refuse changes that do not suit the model or each other. Raises ConfigurationError, with the why."""
    build_dynamics(configs, model.layer_count, model.family)
    check_changes(model, configs)
    check_cached_outputs(model, configs)


def warn_without_effect(configs: Sequence[DynamicConfig], layer_count: int, total_steps: int) -> None:
    """Say of changes whose settings let them change nothing that they do not."""
    for config in configs:
        change = build_dynamic(config, layer_count)
        # Kinds of other distributions need not tell.
        why = change.without_effect(total_steps) if hasattr(change, "without_effect") else ""
        if why:
            logger.warning("dynamics: %s changes nothing in this job: %s", config.kind, why)


def check_changes(model: Model, configs: Sequence[DynamicConfig]) -> None:
    """Refuse a change that would change no layer of the model, or break the layers that it does not know.

    Layers are built one after the other, without memory for their weights where they allow that, until each
    change has found one: a change of every layer looks at all of them.

    Raises:
        ConfigurationError: names the change, the layers, and what these have not.
    """
    last = model.layer_count - 1
    looking = {config.kind: build_dynamic(config, model.layer_count) for config in configs}
    reasons: dict[str, list[Lacking]] = {kind: [] for kind in looking}
    for index in range(model.layer_count):
        if not looking:
            return
        module = layer_without_memory(model, index)
        for kind, change in list(looking.items()):
            what = change.lacks(index, module)
            if what:
                reasons[kind].append(Lacking(index, type(module).__name__, what))
            elif not change.every_layer_between:
                del looking[kind]
    for kind, change in looking.items():
        found = reasons[kind]
        between = [reason for reason in found if 0 < reason.layer < last]
        if len(found) == model.layer_count or (change.every_layer_between and between):
            changes = "cannot pass" if change.every_layer_between else "changes no layer of this model"
            raise ConfigurationError(
                "dynamics",
                f"{kind} {changes}: {described(between or found)}. To fix: leave {kind} out, or give the "
                "blocks what they lack (docs/trainer-changes.md, Blocks that can change)",
            )


def check_cached_outputs(model: Model, configs: Sequence[DynamicConfig]) -> None:
    """Refuse ``freezing.cacheBytes`` where samples need not come again, or layers that freeze draw numbers.

    Raises:
        ConfigurationError: names the data, or the layers and what draws in them.
    """
    field = "dynamics.freezing.cacheBytes"
    for config in configs:
        if config.freezing is None or config.freezing.cache_bytes is None:
            continue
        if not isinstance(model.batch, ShuffledDataset):
            raise ConfigurationError(
                field,
                "outputs are kept by sample, and data.name gives a function or a loader, whose samples need "
                "not come again. To fix: return a dataset with len() and [index], or leave cacheBytes out",
            )
        found = []
        for index in range(most_frozen(config, model.layer_count)):
            module = layer_without_memory(model, index)
            what = drawing_part(module)
            if what:
                found.append(Lacking(index, type(module).__name__, what))
        if found:
            raise ConfigurationError(
                field,
                f"{described(found)}: a sample would get other outputs each time. To fix: turn that off in "
                "layers that freeze, lower target, or leave cacheBytes out",
            )


def drawing_part(module: nn.Module) -> str:
    """Part of a layer that draws random numbers or keeps statistics of batches, as text; empty: none."""
    for name, part in module.named_modules():
        rates = [getattr(part, attribute, 0.0) for attribute in ("dropout", "attention_dropout")]
        if isinstance(part, _DropoutNd):
            rates.append(part.p)
        rate = next((one for one in rates if isinstance(one, float | int) and one > 0), 0.0)
        where = f" at {name!r}" if name else ""
        if rate > 0:
            return f"dropout of {rate} in {type(part).__name__}{where}"
        if isinstance(part, _BatchNorm):
            return f"{type(part).__name__}{where}, which uses statistics of the batch"
    return ""
