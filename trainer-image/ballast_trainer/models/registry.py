"""Models by name, and those of the user as ``module:callable``."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from ballast_policies.contract.job import DataConfig, ModelConfig

from ballast_trainer.data.sources import batches_from
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.autoencoder import build_autoencoder
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model, no_batch
from ballast_trainer.models.recurrent import build_recurrent
from ballast_trainer.seeding import host_seeded

MODELS: dict[str, Callable[..., Model]] = {
    "autoencoder": build_autoencoder,
    "gpt": build_gpt,
    "recurrent": build_recurrent,
}


def load_callable(field: str, name: str) -> Callable[..., Any]:
    """The callable that ``module:callable`` names.

    Raises:
        ConfigurationError: there is no such module or callable.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        reason = f"cannot load {name!r}: {error}. To fix: name an importable module:callable"
        raise ConfigurationError(field, reason) from error
    if not callable(found):
        raise ConfigurationError(field, f"{name!r} is not callable")
    loaded: Callable[..., Any] = found
    return loaded


def build_model(config: ModelConfig, data: DataConfig | None = None, *, seed: int = 0) -> Model:
    """Build the model that the configuration names, on the data that it names.

    Args:
        config: the model.
        data: used in place of the model's own data.
        seed: of torch's generator while a builder of the user's runs.

    Raises:
        ConfigurationError: the name is unknown, the arguments do not fit, or the model does not have
            as many layers as ``model.layers``.
    """
    if ":" in config.name:
        builder = load_callable("model.name", config.name)
    elif config.name in MODELS:
        builder = MODELS[config.name]
    else:
        raise ConfigurationError.unknown("model.name", config.name, MODELS)
    arguments = dict(config.args)
    if config.layers is not None and builder in MODELS.values():
        arguments.setdefault("layers", config.layers)
    try:
        with host_seeded(seed):
            model = builder(**arguments)
    except ImportError as error:
        reason = f"{config.name!r} needs a module that is not installed: {error}"
        raise ConfigurationError("model.name", reason) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "model.args", f"{dict(config.args)} do not fit {config.name!r}: {error}"
        ) from error
    if not isinstance(model, Model):
        raise ConfigurationError(
            "model.name", f"{config.name!r} returned {type(model).__name__}, not a Model"
        )
    if config.layers is not None and model.layer_count != config.layers:
        built = f"{config.name!r} with args {dict(config.args)} has {model.layer_count} layers"
        reason = f"{config.layers}, but {built}"
        raise ConfigurationError("model.layers", reason)
    if data is not None:
        return dataclasses.replace(model, batch=batches_from(data_source(data)))
    if model.batch is no_batch:
        raise ConfigurationError("data.name", f"missing: {config.name!r} brings no data of its own")
    return model


def data_source(data: DataConfig, field: str = "data") -> Any:
    """What the callable that a configuration names returns: a batch function, a dataset or a loader.

    Args:
        data: the callable and its arguments.
        field: where it stands in the configuration.

    Raises:
        ConfigurationError: there is no such callable, or the arguments do not fit.
    """
    maker = load_callable(f"{field}.name", data.name)
    try:
        return maker(**data.args)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"{field}.args",
            f"{dict(data.args)} do not fit {data.name!r}: {error}. To fix: the arguments that it takes",
        ) from error
