"""Layers that share a parameter through functions that build them are refused before the first step."""

import functools
import re

import pytest
from ballast_policies.contract import ExitCode
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.tied import refuse_tied_layers
from torch import nn


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight


def tied_by_closure():
    embedding = nn.Embedding(8, 4)
    return Model.from_layers(
        [lambda: embedding, lambda: nn.Linear(4, 4), lambda: Head(embedding)],
        loss=nn.functional.cross_entropy,
    )


def tied_by_a_cache():
    @functools.cache
    def embedding():
        return nn.Embedding(8, 4)

    return Model.from_layers(
        [embedding, lambda: nn.Linear(4, 4), lambda: Head(embedding())],
        loss=nn.functional.cross_entropy,
    )


def cached_but_apart():
    made = [nn.Linear(4, 4) for _ in range(3)]
    return Model(layer_count=3, build_layer=lambda index: made[index], loss=nn.functional.mse_loss)


@pytest.mark.parametrize("build", [tied_by_closure, tied_by_a_cache])
def test_both_layers_and_their_parameter_are_named(build):
    """However the functions come to share it."""
    message = re.escape("layers 0 and 2 share a parameter ('weight', 'weight')")
    with pytest.raises(ConfigurationError, match=message):
        refuse_tied_layers(build(), seed=0)


def test_layers_that_outlive_their_use_without_being_shared_are_accepted():
    """A model that keeps the modules it hands out."""
    refuse_tied_layers(cached_but_apart(), seed=0)


@pytest.mark.processes
def test_a_job_with_tied_layers_ends_before_its_first_step(gang):
    """Exit code 2 with the layers' names, although no rank holds both."""
    config = {
        "totalSteps": 3,
        "model": {"name": "tests.trainer.models.test_tied_layers:tied_by_closure"},
        "data": {"name": "tests.trainer.models.picky_model:batches"},
        "pipeline": {"microbatches": 2, "globalBatchSize": 4},
    }
    running = gang(config, ranks=1)
    assert running.exit_codes() == {"rank-0": ExitCode.USAGE}
    assert "layers 0 and 2 share a parameter" in running.errors()
    assert running.losses() == {}
