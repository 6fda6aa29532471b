"""The loss of a step is the mean over its targets that count, in whichever microbatch they are."""

import pytest
import torch
from ballast_trainer.errors import TrainerError
from ballast_trainer.models.loss_weights import weights_of

from tests.support.examples import first_daily
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.trainer.models import tied_models

MODULE = "tests.trainer.models.test_weighted_losses"
STEPS = 4


def uneven(seed, step, size):
    """Words of which the later samples have ever fewer that count; in step 2 the last two have none."""
    words, targets = tied_models.batch(seed, step, size)
    for sample in range(size):
        targets[sample, max(1, 6 - sample) :] = -100
    if step == 2:
        targets[size - 2 :] = -100
    return words, targets


def nothing_to_learn(seed, step, size):
    words, targets = uneven(seed, step, size)
    return words, targets if step != 1 else torch.full_like(targets, -100)


def batches(name="uneven"):
    return globals()[name]


def job(data="uneven", microbatches=4, **fields):
    named = {"name": f"{MODULE}:batches", "args": {"name": data}}
    return small_job(
        {"name": "gpt", "args": {"layers": 6, "dim": 16, "context": 8, "dropout": 0.0}},
        data=named,
        evaluation={"everySteps": 1, "batches": 2, "data": named},
        steps=STEPS,
        microbatches=microbatches,
        batch=8,
        training={"optimizer": "sgd", "learningRate": 0.5},
        **fields,
    )


def evaluated(events):
    return [event["validation_loss"] for event in events if event["event"] == "evaluation"]


@pytest.fixture(scope="module")
def whole():
    """The batch in one piece."""
    return train_here(job(microbatches=1))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "fields"),
    first_daily(
        [
            (2, {"pipeline": {"schedule": "1F1B"}}),
            (2, {"pipeline": {"schedule": "ZeroBubbleH1"}}),
            (4, {"parallelism": {"data": 2}}),
            (3, {"pipeline": {"replicas": [1, 2]}}),
        ]
    ),
    ids=["1F1B", "zero-bubble", "replicas", "replicas-of-a-stage"],
)
def test_stages_and_replicas_learn_what_the_whole_batch_does(gang, whole, ranks, fields):
    """Torch's schedules, our executor's, and data replicas, which have other targets each."""
    running = gang(job(**fields), ranks=ranks).succeeded()
    assert running.losses() == pytest.approx(whole.losses, abs=1e-5)
    assert evaluated(running.events("evaluation")) == pytest.approx(evaluated(whole.events), abs=1e-5)


@pytest.mark.processes
def test_a_schedule_without_a_flush_weighs_alike(gang, whole):
    """The first step, which runs on the first weights, has the loss of the whole batch."""
    config = job(pipeline={"schedule": "PipeDream2BW"})
    running = gang(config, ranks=2).succeeded()
    assert running.losses()[1] == pytest.approx(whole.losses[1], abs=1e-5)


@pytest.mark.slow
def test_a_step_without_a_target_changes_nothing_and_is_told(caplog):
    """Its loss is 0, not NaN."""
    told = train_here(job("nothing_to_learn"))
    assert told.losses[2] == 0.0
    assert "the batch of step 2 has no target that counts" in caplog.text


@pytest.mark.parametrize(
    ("weight", "why"),
    [(None, "is a NoneType"), ("2 or 3", "is a str"), (torch.ones(3), r"is a tensor of shape \[3\]")]
    + [(wrong, f"is {wrong} for") for wrong in (-1.0, float("nan"), float("inf"))],
)
def test_a_weight_that_is_no_number_from_0_on_is_refused(weight, why):
    """Not taken for targets none of which counts, whose loss is 0."""
    with pytest.raises(TrainerError, match=rf"loss_weight {why}.*To fix"):
        weights_of(lambda targets: weight, torch.zeros(4), 2)
