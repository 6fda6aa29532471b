"""Keeping what frozen layers put out: refused where it cannot be right, and the same losses where it is."""

import pytest
from ballast_trainer.data.corpus import text_batch
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.jobs import small_job

HERE = "tests.trainer.dynamics.test_cached_outputs"
SAMPLES, CONTEXT = 16, 8


def windows():
    """A dataset: a list of pairs."""
    return list(zip(*text_batch(0, 0, SAMPLES, CONTEXT), strict=True))


def drawn():
    """A batch function, which decides on its samples itself."""
    return lambda seed, step, size: text_batch(seed, step, size, CONTEXT)


def with_statistics():
    """A model one of whose layers looks at the whole batch."""

    def build_layer(index):
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if index == 1 else nn.Linear(4, 4)

    return Model(layer_count=6, build_layer=build_layer, loss=nn.functional.mse_loss)


def job(*, dropout=0.0, data="windows", freezing=None, **fields):
    freezing = {"cacheBytes": 10**8, **(freezing or {})}
    arguments = {"dim": 16, "heads": 2, "context": CONTEXT, "dropout": dropout}
    steps = {"startStep": 2, "endStep": 2, "target": 0.7}
    given = {"data": f"{HERE}:{data}", "steps": 10, "microbatches": 4, "batch": 8}
    return small_job({"name": "gpt", "layers": 8, "args": arguments}, **given) | {
        "dynamics": [{"kind": "freezing", **steps, "freezing": freezing}],
        "rebalance": {"everySteps": 3, "minGain": 0.99},
        **fields,
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dropout": 0.1}, "layers 1 to 4 (Block) have dropout of 0.1"),
        ({"data": "drawn"}, "a function or a loader, whose samples need not come again"),
        ({"model": {"name": f"{HERE}:with_statistics"}}, "layer 1 (Sequential) has BatchNorm1d at '1'"),
    ],
)
def test_a_job_whose_frozen_layers_cannot_be_passed_is_refused(changed, words):
    """Before the first step, with the reason and what to change."""
    with pytest.raises(ConfigurationError, match="To fix:") as caught:
        ValidatedJob.from_mapping(job(**changed))
    assert words in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    "freezing", first_daily([{"criterion": "weightChange", "threshold": 1000, "thawSteps": 3}, {}])
)
def test_losses_are_those_of_a_job_that_computes_all(gang, single_process_losses, freezing):
    """Over several epochs, also where layers thaw; both ranks pass their frozen layers."""
    config = job(freezing={"patience": 1, **freezing} if freezing else {})
    computing = job(freezing={**config["dynamics"][0]["freezing"], "cacheBytes": None})
    if freezing:
        for one in (config, computing):
            one["dynamics"][0] |= {"endStep": 10, "everySteps": 2}
    running = gang(config, ranks=2).succeeded()
    losses, expected = running.losses(), single_process_losses(computing)
    assert_same_curve(losses, expected)
    kept = [line["cached"] for line in running.events("frozen")]
    assert not any(line["cacheRefused"] for line in running.events("frozen"))
    if freezing:
        assert any(kept)
    else:
        # Rank 0 holds layers 0 to 3, all frozen; rank 1 the others, the first of which is.
        assert kept[-1] == {"3": SAMPLES, "4": SAMPLES}
