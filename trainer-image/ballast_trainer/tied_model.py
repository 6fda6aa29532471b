"""Tied weights of a job: found before the first step, refused where they cannot be right."""

import copy
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.dynamics import DYNAMICS
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.dynamics.freezing import Freezing, most_frozen
from ballast_trainer.dynamics.protocol import Dynamic, is_built_in
from ballast_trainer.dynamics.pruning.pruning import GradualPruning
from ballast_trainer.dynamics.registry import build_dynamic
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model, buildable, checked, layer_without_memory
from ballast_trainer.models.ties import Member, Tie, TieSearch, as_text, merged
from ballast_trainer.pipeline.layout import is_asynchronous
from ballast_trainer.seeding import host_seeded, seed_build
from ballast_trainer.tensor_parallel.layers import split_layer

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 30.0
"""Seconds after which no further layers are built and looked at."""


def find_ties(model: Model, *, seed: int) -> tuple[Tie, ...]:
    """The model's ties: those that it states, and those of parameters that its layers share.

    Layers that functions make are built one after the other, so one is in memory at a time.

    Raises:
        ConfigurationError: a layer cannot be built, or layers share what cannot be tied.
    """
    search = TieSearch()
    began = time.monotonic()
    for index in range(model.layer_count):
        if time.monotonic() - began > _LONGEST_SECONDS:
            logger.warning(
                "tied weights were looked for in layers 0 to %d only: building takes long. "
                "To fix: state them, Model(tied=...)",
                index - 1,
            )
            break
        kept = model.kept_layer(index)
        search.look_at(_built(model, index, seed) if kept is None else checked(kept, index))
        try:
            search.add(index)
        except ValueError as error:
            raise ConfigurationError("model.name", str(error)) from error
    return merged([*model.tied, *search.ties()])


def _built(model: Model, index: int, seed: int) -> nn.Module:
    # Not on the device meta, where the caller may count operations: a cache would keep it.
    with host_seeded(), torch.device("cpu"):
        seed_build(seed=seed, layer=index)
        return buildable(model, index)


def with_ties(model: Model, ties: Sequence[Sequence[Member]], *, seed: int) -> Model:
    """The model with these ties, whose tied layers are copies of what its functions share."""
    found = merged(ties)
    if not found:
        return model
    before = {
        layer: sorted({other for other, _ in tie if other < layer}) for tie in found for layer, _ in tie
    }

    def build_layer(index: int) -> nn.Module:
        if index not in before or model.kept_layer(index) is not None:
            return model.build_layer(index)
        # Where functions share a parameter by a cache, the first layer fills it, as in one process.
        earlier = [_built(model, layer, seed) for layer in before[index]]
        with torch.device("cpu"):
            layer = copy.deepcopy(model.build_layer(index))
        del earlier
        return layer

    return dataclasses.replace(model, tied=found, build_layer=build_layer)


_UNTIE = "untie them (Hugging Face: tie_word_embeddings: false)"


def tied_model(model: Model, config: JobConfig) -> Model:
    """The model with all its ties; builds layers one after the other to find them, so one rank does it.

    Raises:
        ConfigurationError: a tie, or what the job does besides, cannot be right.
    """
    found = with_ties(model, find_ties(model, seed=config.training.seed), seed=config.training.seed)
    check_ties(found, config)
    return found


def check_ties(model: Model, config: JobConfig) -> None:
    """Refuse ties that are none, and jobs that would not keep a parameter the same in all its layers.

    Raises:
        ConfigurationError: names the layers, the parameter, the reason and what to change.
    """
    if not model.tied:
        return
    if is_asynchronous(config.pipeline.schedule):
        raise ConfigurationError(
            "pipeline.schedule",
            f"{config.pipeline.schedule} updates each stage at a time of its own, and "
            f"{as_text(model.tied[0])} are one parameter. "
            f"To fix: a schedule with a flush, e.g. 1F1B, or {_UNTIE}",
        )
    _check_members(model)
    changes = [build_dynamic(change, model.layer_count) for change in config.dynamics]
    freezing = [
        change
        for change in config.dynamics
        if change.kind in DYNAMICS and DYNAMICS[change.kind].stops_learning
    ]
    frozen = max((most_frozen(change, model.layer_count) for change in freezing), default=0)
    for index in sorted({layer for tie in model.tied for layer, _ in tie}):
        ties = [tie for tie in model.tied if index in dict(tie)]
        if index < frozen:
            raise ConfigurationError(
                "dynamics",
                f"freezing may stop layer {index} from learning, and {as_text(ties[0])} are one parameter. "
                f"To fix: leave freezing out, or {_UNTIE}",
            )
        _check_changes(model, index, ties, changes)
        _check_split(model, index, ties, config)


def _check_members(model: Model) -> None:
    known: dict[int, dict[str, Any]] = {}
    for index in sorted({layer for tie in model.tied for layer, _ in tie if 0 <= layer < model.layer_count}):
        kept = model.kept_layer(index)
        module = layer_without_memory(model, index) if kept is None else kept
        known[index] = {
            name: (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
            for name, parameter in module.named_parameters()
        }
    for tie in model.tied:
        if len({layer for layer, _ in tie}) < len(tie):
            raise ConfigurationError(
                "model.name", f"{as_text(tie)}: a tie has one parameter of a layer. To fix: Model.tied"
            )
        for index, name in tie:
            if name not in known.get(index, {}):
                raise ConfigurationError(
                    "model.name",
                    f"the model ties {as_text(tie)}, and its layers 0 to {model.layer_count - 1} have no "
                    f"parameter {name!r} of layer {index}. To fix: Model.tied",
                )
        facts = {known[index][name] for index, name in tie}
        if len(facts) > 1:
            raise ConfigurationError(
                "model.name",
                f"the model ties {as_text(tie)}, which differ in shape, type or whether they learn: "
                f"{sorted(facts)}. To fix: Model.tied",
            )


def _check_changes(model: Model, index: int, ties: Sequence[Tie], changes: Sequence[Dynamic]) -> None:
    for change in changes:
        module = layer_without_memory(model, index)
        if isinstance(change, Freezing) or change.lacks(index, module):
            continue
        tied = {id(module.get_parameter(dict(tie)[index])): tie for tie in ties}
        kept = {id(parameter) for parameter in change.prepare(index, module).parameters()}
        lost = [tie for identity, tie in tied.items() if identity not in kept]
        if isinstance(change, GradualPruning) or not is_built_in(change):
            # It may change values or shape of any parameter of the layer.
            lost = list(ties)
        if lost:
            raise ConfigurationError(
                "dynamics",
                f"{change.kind} changes the parameters of layer {index}, and {as_text(lost[0])} are one "
                "parameter. To fix: leave that change out (pruning: structure neurons or heads), or "
                f"{_UNTIE}",
            )


def _check_split(model: Model, index: int, ties: Sequence[Tie], config: JobConfig) -> None:
    if config.parallelism.tensor == 1:
        return
    module = layer_without_memory(model, index)
    tied = {id(module.get_parameter(dict(tie)[index])): tie for tie in ties}
    split = split_layer(module, Axis(ranks=tuple(range(config.parallelism.tensor))))
    kept = {id(parameter) for parameter in split.parameters()}
    for identity, tie in tied.items():
        if identity not in kept:
            raise ConfigurationError(
                "parallelism.tensor",
                f"layer {index} is split over the ranks, and {as_text(tie)} are one parameter. "
                f"To fix: set it to 1, or {_UNTIE}",
            )
