"""Models by name; ``module:callable`` reaches a user's own."""

import importlib
from collections.abc import Callable
from typing import Any

from ballast_trainer.config import ModelConfig
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.autoencoder import build_autoencoder
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.recurrent import build_recurrent

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


def build_model(config: ModelConfig) -> Model:
    """Build the model that the configuration names.

    Raises:
        ConfigurationError: the name is unknown, the arguments do not fit, or the model does not have
            as many layers as ``model.layers`` says.
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
        model = builder(**arguments)
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
    return model
