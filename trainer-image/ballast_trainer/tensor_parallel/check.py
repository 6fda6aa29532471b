"""The check, before ranks start, that a model can be cut for tensor parallelism."""

import torch
from ballast_policies.contract.job.job import JobConfig

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.without_memory import buildable
from ballast_trainer.tensor_parallel.layers import split_layer


def check_tensor_parallel(model: Model, config: JobConfig) -> None:
    """Refuse a model that cannot be cut.

    Raises:
        ConfigurationError: no layer can be cut, or one cannot.
    """
    size = config.parallelism.tensor
    if size == 1:
        return
    axis = Axis(ranks=tuple(range(size)))
    with torch.random.fork_rng():
        for index in range(model.layer_count):
            try:
                split = split_layer(buildable(model, index), axis)
            except ValueError as error:
                reason = f"{size}: layer {index}: {error}. To fix: a divisor of it, or 1"
                raise ConfigurationError("parallelism.tensor", reason) from error
            if slicings(split):
                return
    raise ConfigurationError(
        "parallelism.tensor",
        f"no layer of {config.model_name!r} can be cut. To fix: set it to 1, or register your layers "
        "with ballast_trainer.tensor_parallel.layers.split_layer_type",
    )
