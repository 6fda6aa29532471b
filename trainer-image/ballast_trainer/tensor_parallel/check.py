"""Checks of a configuration with tensor parallelism, before ranks start."""

import torch
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.schedules import find_schedule

from ballast_trainer.config import TrainerConfig
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.slicing import slicings

MIGRATING = ("migrate", "semi")


def check_tensor_parallel(model: Model, config: TrainerConfig) -> None:
    """Refuse a model that cannot be cut, or a change that needs whole layers.

    Raises:
        ConfigurationError: naming the field, the reason and what to change.
    """
    size, schedule = config.parallelism.tensor, config.pipeline.schedule
    if size == 1:
        return
    policy = config.parallelism.stragglers.policy
    if policy in MIGRATING and find_schedule(schedule).splits_backward:
        raise ConfigurationError(
            "parallelism.stragglers.policy",
            f"{policy} sends weights' gradients home with the inputs', which {schedule} computes apart. "
            "To fix: policy resize, or pipeline.schedule 1F1B",
        )
    for dynamic in config.dynamics:
        if DYNAMICS[dynamic.kind].inside_layers:
            raise ConfigurationError(
                f"dynamics[{dynamic.kind}]",
                f"changes the inside of layers, which parallelism.tensor {size} cuts. "
                "To fix: use parallelism.data, or more pipeline stages",
            )
    axis = Axis(ranks=tuple(range(size)))
    with torch.random.fork_rng():
        for index in range(model.layer_count):
            try:
                split = split_layer(model.build_layer(index), axis)
            except ValueError as error:
                raise ConfigurationError("parallelism.tensor", f"layer {index}: {error}") from error
            if slicings(split):
                return
    raise ConfigurationError(
        "parallelism.tensor",
        f"no layer of {config.model.name!r} can be cut. To fix: set it to 1, or register your layers "
        "with ballast_trainer.tensor_parallel.layers.split_layer_type",
    )
