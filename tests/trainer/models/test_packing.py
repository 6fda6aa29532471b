"""Samples of several lengths in one row learn what they learn in rows of their own."""

import pytest
import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_trainer.data.collate import BatchForm
from ballast_trainer.data.sources import batches_from
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from torch.nn import functional

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.trainer.models import families

MODULE = "tests.trainer.models.test_packing"
STEPS = 6


class Texts(torch.utils.data.Dataset):
    """Texts of 2 to 13 tokens, of which some targets do not count."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, 64, (2 + index * 7 % 12,), generator=generator)
        ahead = functional.pad(tokens, (0, 1), value=-100)[1:]
        return tokens, torch.where(tokens % 5 == 0, -100, ahead)


def job(name="llama", packing=True, microbatches=2, **fields):
    data = {"name": f"{MODULE}:Texts", "padToMultipleOf": 8, "packing": packing}
    return small_job(
        families.model(name),
        data=data,
        evaluation={"everySteps": 3, "batches": 2, "data": data},
        steps=STEPS,
        microbatches=microbatches,
        batch=8,
        training={"optimizer": "sgd", "learningRate": 0.2, **fields.pop("training", {})},
        **fields,
    )


def test_rows_hold_whole_samples_and_are_about_equally_long():
    """In the data's order within a row; what fills up is no target, and no further sample's context."""
    samples = [(torch.full((n,), n), torch.full((n,), -n)) for n in (5, 2, 3, 4, 1)]
    inputs, targets = BatchForm(rows=2, multiple=5).of_samples(samples)
    rows = [[5, 5, 5, 5, 5, 2, 2, 1, 0, 0], [3, 3, 3, 4, 4, 4, 4, 0, 0, 0]]
    assert inputs["input_ids"].tolist() == rows
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 0, 0], [0, 1, 2, 0, 1, 2, 3, 0, 0, 0]]
    assert targets.tolist() == [[-token or -100 for token in row] for row in rows]


def test_labels_are_shifted_within_each_sample():
    """The last token of a sample has no target, neither in a row of its own nor before the next one's."""
    samples = [(torch.arange(n, 2 * n), torch.arange(n, 2 * n)) for n in (3, 2)]
    packed = BatchForm(rows=1, shift=True)
    assert packed.checked(packed.of_samples(samples), 2)[1].tolist() == [[4, 5, -100, 3, -100]]
    padded = BatchForm(multiple=1, shift=True)
    assert padded.checked(padded.of_samples(samples), 2)[1].tolist() == [[4, 5, -100], [3, -100, -100]]
    with pytest.raises(ConfigurationError, match="no labels of tokens"):
        BatchForm(shift=True).checked((torch.ones(2, 3), torch.ones(2, 3)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_daily(["mistral", "gpt2", "phimoe", "gemma2", "llama", "gptj"], 2))
def test_packed_samples_learn_as_padded_ones_do(name):
    """Rotations, learned positions, windows shorter than a text, experts; in training and evaluation."""
    pytest.importorskip("transformers")
    packed, padded = train_here(job(name)), train_here(job(name, packing=False))
    assert_same_curve(packed.losses, padded.losses)
    assert packed.evaluations() == pytest.approx(padded.evaluations(), abs=1e-5)


@pytest.mark.processes
def test_replicas_recompute_and_go_on_after_a_stop_with_packed_rows(gang, tmp_path):
    """Rows of the batch are shared between two pipelines; a later launch of one rank continues the data."""
    pytest.importorskip("transformers")
    config = job(
        microbatches=4,
        parallelism={"data": 2},
        training={"recompute": True},
        checkpoint={"path": str(tmp_path / "checkpoints"), "everySteps": 3},
    )
    running = gang({**config, "totalSteps": 3}, ranks=2).succeeded()
    further = train_here({**config, "parallelism": {"data": 1}})
    padded = train_here(job(packing=False, microbatches=4))
    assert_same_curve(running.losses() | further.losses, padded.losses)
    found = {one["step"]: one["validation_loss"] for one in running.events("evaluation")}
    assert found | further.evaluations() == pytest.approx(padded.evaluations(), abs=1e-5)


def two_texts():
    return lambda seed, step, size: (torch.zeros(size, 4), torch.zeros(size, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"name": "gpt"}}, "the model has no positions that begin anew.*To fix: padToMultipleOf"),
        (
            {"model": {**job()["model"], "args": families.arguments("bloom")}},
            "no positions that begin anew",
        ),
        ({"data": {"name": f"{MODULE}:two_texts", "packing": True}}, "gives whole batches"),
    ],
    ids=["gpt", "bloom", "function"],
)
def test_what_cannot_be_packed_is_refused(change, words):
    """Models whose attention would cross samples, and data that come in batches."""
    pytest.importorskip("transformers")
    with pytest.raises(ConfigurationError, match=words) as refused:
        ValidatedJob.from_mapping({**job(), **change})
    assert refused.value.field == "data.packing"


@pytest.mark.parametrize(
    ("tokens", "targets"), [((3, 2), (3, 2)), ((4,), (3,)), ((0,), (0,))], ids=["image", "uneven", "empty"]
)
def test_samples_that_are_no_texts_are_not_packed(tokens, targets):
    """The one of several that is none is told, not what any of them alone would be for two rows."""
    pairs = [((3,), (3,))] * 4 + [(tokens, targets)]
    samples = [tuple(torch.ones(shape).long() for shape in pair) for pair in pairs]
    with pytest.raises(
        ConfigurationError, match=r"a sample has inputs of shape .*To fix: some tokens"
    ) as told:
        batches_from(samples, BatchForm(rows=2))(0, 0, 5)
    assert told.value.__notes__ == ["sample 4"]


def test_freezing_may_go_with_packing():
    """It leaves the inside of layers as it is."""
    freezing = {"kind": "freezing", "endStep": 3, "target": 0.5}
    assert JobConfig.from_mapping({**job(), "dynamics": [freezing]}).data.packing
