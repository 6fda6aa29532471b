"""Samples of several lengths, and samples that cannot be read, on several ranks."""

import os

import pytest
import torch

pytestmark = pytest.mark.processes


def rows(samples=60, longest=16):
    """Sentences of 3 to ``longest`` tokens, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, longest + 1, (samples,), generator=generator).tolist()
    tokens = [torch.randint(0, 64, (length + 1,), generator=generator) for length in lengths]
    return [{"input_ids": row[:-1].tolist(), "labels": row[1:].tolist()} for row in tokens]


def uneven(small_config, **fields):
    config = small_config(
        totalSteps=10,
        data={
            "name": "tests.trainer.loop.test_uneven_data:rows",
            "columns": {"inputs": "input_ids", "targets": "labels"},
            "padToMultipleOf": 2,
        },
        **fields,
    )
    config["pipeline"] |= {"microbatches": 4, "globalBatchSize": 4}
    return config


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (3, {"rebalance": {"enabled": True, "everySteps": 3, "minGain": 0.0}}),
        pytest.param(4, {"parallelism": {"data": 2}}, marks=pytest.mark.nightly),
        pytest.param(
            4,
            {"repack": {"enabled": True, "minStages": 2, "everySteps": 3, "maxSlowdown": 9.0}},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_batches_of_several_lengths_learn_as_in_one_process(
    gang, small_config, single_process_losses, ranks, fields
):
    """Each as long as its longest sample, while layers move; ranks in the middle read none."""
    config = uneven(small_config, **fields)
    running = gang(config, ranks=ranks)
    assert set(running.exit_codes().values()) == {0}, running.errors()
    expected, found = single_process_losses(config), running.losses()
    assert sorted(found) == sorted(expected)
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


class Torn:
    """Rows of which some cannot be read, each by one rank alone."""

    def __init__(self, per_rank):
        self.rows, self.per_rank = rows(longest=8), per_rank

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        rank = int(os.environ["RANK"]) if self.per_rank else index % 3
        if index in (9, 12, 20) and index % 3 == rank:
            raise OSError(5, f"no block {index}")
        return self.rows[index]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_sample_that_one_rank_cannot_read_is_replaced_on_all(gang, small_config, workers):
    """As on one rank that cannot read any of them; each is told once, with its number and error."""
    runs = []
    for ranks, per_rank in ((1, False), (3, True)):
        config = uneven(small_config, training={"skipBadSamples": 3, "dataloaderNumWorkers": workers})
        config["totalSteps"] = 16
        config["data"] |= {
            "name": "tests.trainer.loop.test_uneven_data:Torn",
            "args": {"per_rank": per_rank},
        }
        runs.append(gang(config, ranks=ranks))
        assert set(runs[-1].exit_codes().values()) == {0}, runs[-1].errors()
    alone, apart = (run.losses() for run in runs)
    assert max(abs(alone[step] - apart[step]) for step in alone) < 1e-5
    for run in runs:
        told = {event["sample"]: event["error"] for event in run.events("badSample")}
        assert set(told) <= {9, 12, 20} and len(told) >= 2
        assert all(f"no block {number}" in error for number, error in told.items())
