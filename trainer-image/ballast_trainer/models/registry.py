"""Models by name, and those of the user as ``module:callable``."""

import dataclasses
import importlib
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from ballast_policies.contract.errors import shown
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_policies.contract.limits import MOST_LAYERS

from ballast_trainer.causes import with_place
from ballast_trainer.data.collate import BatchForm
from ballast_trainer.data.sources import batches_from
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.models.autoencoder import build_autoencoder
from ballast_trainer.models.deferred import CannotDeferError, DeferredWeights
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model, no_batch
from ballast_trainer.models.recurrent import build_recurrent
from ballast_trainer.seeding import host_seeded

logger = logging.getLogger(__name__)

MODELS: dict[str, Callable[..., Model]] = {
    "autoencoder": build_autoencoder,
    "gpt": build_gpt,
    "recurrent": build_recurrent,
}


_TOLD_BYTES = 64 << 20
"""Bytes of weights from which on it is told that they are in every rank's memory."""

_ARGUMENTS = "To fix: the arguments that it takes, with values that it can use"


def load_callable(field: str, name: str) -> Callable[..., Any]:
    """The callable that ``module:callable`` names.

    Raises:
        ConfigurationError: there is no such module or callable, or the module fails as it is imported.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        reason = f"cannot load {name!r}: {error}. To fix: name an importable module:callable"
        raise ConfigurationError(field, reason) from error
    except (Exception, SystemExit) as error:  # a user's module may do anything as it is imported
        reason = f"cannot load {name!r}: {with_place(error)}. To fix: the module {module_name}"
        raise ConfigurationError(field, reason) from error
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(field, f"{name!r} is no callable, but {kind}. To fix: name a function")
    loaded: Callable[..., Any] = found
    return loaded


def build_model(
    config: ModelConfig, data: DataConfig | None = None, *, seed: int = 0, microbatches: int = 1
) -> Model:
    """Build the model that the configuration names, on the data that it names.

    Args:
        config: the model.
        data: used in place of the model's own data.
        seed: of the host's generators while a builder of the user's runs, of the model or of data.
        microbatches: of a batch.

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
    given = shown(dict(config.args))
    try:
        model = _with_deferred_weights(config.name, lambda: builder(**arguments), seed)
    except TrainerError:
        raise
    except ImportError as error:
        reason = f"{config.name!r} needs a module that is not installed: {error}. To fix: install it"
        raise ConfigurationError("model.name", reason) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's builder may do anything with its arguments
        reason = f"{given} do not fit {config.name!r}: {_with_fix(error)}"
        raise ConfigurationError("model.args", reason) from error
    if not isinstance(model, Model):
        reason = f"{config.name!r} returned {type(model).__name__}, not a Model. To fix: return a Model"
        raise ConfigurationError("model.name", reason)
    if not isinstance(model.layer_count, int) or not 1 <= model.layer_count <= MOST_LAYERS:
        reason = (
            f"{config.name!r} with args {given} has layer_count {model.layer_count!r}. "
            f"To fix: a whole number from 1 to {MOST_LAYERS}"
        )
        raise ConfigurationError("model.args", reason)
    if config.layers is not None and model.layer_count != config.layers:
        built = f"{config.name!r} with args {given} has {model.layer_count} layers"
        reason = f"{config.layers}, but {built}. To fix: {model.layer_count}, or leave it out"
        raise ConfigurationError("model.layers", reason)
    if data is not None:
        form = batch_form(data, model, microbatches)
        return dataclasses.replace(model, batch=batches_from(data_source(data, seed=seed), form))
    if model.batch is no_batch:
        reason = f"missing: {config.name!r} brings no data of its own. To fix: name the training data"
        raise ConfigurationError("data.name", reason)
    return model


def _with_deferred_weights(name: str, build: Callable[[], Any], seed: int) -> Any:
    """Model of a builder, whose layers have memory for their weights once they are built."""
    weights, reason = DeferredWeights(), ""
    try:
        with host_seeded(seed), weights.building():
            model = build()
        layers = _kept_layers(model)
        if layers and len(layers) < model.layer_count:
            raise CannotDeferError("some layers are made by functions, which may copy others")
        in_memory = weights.keep(layers)
    except (TrainerError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the builder may do what needs weights in memory
        reason = f": {with_place(error)}"
    if reason:
        logger.debug("%s is built as a whole%s", name, reason)
        with host_seeded(seed):
            model = build()
        parameters = {id(one): one for layer in _kept_layers(model) for one in layer.parameters()}
        in_memory = sum(one.nbytes for one in parameters.values())
    if in_memory >= _TOLD_BYTES:
        logger.warning(
            "%s: every rank keeps %.2f GB of the weights of all layers in the host's memory, which cannot be "
            "made or read again by layer%s. To fix: functions that make the layers, for Model.from_layers",
            name,
            in_memory / 1e9,
            reason,
        )
    return model


def _kept_layers(model: Any) -> list[torch.nn.Module]:
    if not isinstance(model, Model):
        return []
    return [kept for kept in map(model.kept_layer, range(model.layer_count)) if kept is not None]


def _with_fix(error: BaseException) -> str:
    """The error of a user's callable as text, with what to change unless it says so itself."""
    text = with_place(error)
    return text if "To fix: " in text else f"{text}. {_ARGUMENTS}"


def batch_form(data: DataConfig, model: Model, microbatches: int, field: str = "data") -> BatchForm:
    """Form of batches of so many microbatches from the data that the configuration names.

    Raises:
        ConfigurationError: there is no such ``collate``, or the model takes no packed samples.
    """
    if data.packing and not (model.takes_positions and model.loss_weight):
        lacks = (
            "no weight of a microbatch" if model.takes_positions else "no positions that begin anew in a row"
        )
        raise ConfigurationError(
            f"{field}.packing",
            f"the model has {lacks}. To fix: padToMultipleOf alone, a decoder of Hugging Face's that takes "
            "position_ids, or a Model with takes_positions and loss_weight",
        )
    return BatchForm(
        field=field,
        collate=None if data.collate is None else load_callable(f"{field}.collate", data.collate),
        columns=data.columns,
        multiple=data.pad_to_multiple_of,
        rows=microbatches if data.packing else None,
        next_tokens=model.predicts_next,
        shift=data.shift_labels,
        divided=microbatches > 1,
    )


def data_source(data: DataConfig, field: str = "data", *, seed: int = 0) -> Any:
    """Data of the callable that a configuration names: a batch function, a dataset or a loader.

    Args:
        data: the callable and its arguments.
        field: where it stands in the configuration.
        seed: of the host's generators meanwhile, so that what it draws, a split say, is the same on each rank
            and after a restart.

    Raises:
        ConfigurationError: there is no such callable, or the arguments do not fit.
    """
    try:
        with host_seeded(seed):
            return load_callable(f"{field}.name", data.name)(**data.args)
    except (TrainerError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's function may do anything with its arguments
        reason = f"{shown(dict(data.args))} do not fit {data.name!r}: {_with_fix(error)}"
        raise ConfigurationError(f"{field}.args", reason) from error
