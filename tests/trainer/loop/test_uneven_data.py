"""Samples of several lengths on several ranks."""

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
