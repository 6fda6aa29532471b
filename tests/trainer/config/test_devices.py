"""Ranks of a machine choose their device and threads alike, and never take a GPU twice."""

import pytest
import torch
from ballast_trainer import device as device_module
from ballast_trainer.device import choose_device, threads_of_rank
from ballast_trainer.environment import DeviceChoice
from ballast_trainer.errors import ConfigurationError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with some GPUs; returns those that ranks have taken."""

    def with_gpus(count):
        taken = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return taken

    return with_gpus


@pytest.mark.parametrize(
    ("gpus", "ranks", "choice", "types"),
    [
        (0, 4, "auto", ["cpu"] * 4),
        (1, 4, "auto", ["cpu"] * 4),
        (4, 4, "auto", ["cuda"] * 4),
        (8, 1, "auto", ["cuda"]),
        (8, 4, "cpu", ["cpu"] * 4),
        (4, 4, "cuda", ["cuda"] * 4),
    ],
)
def test_all_ranks_of_a_machine_compute_on_the_same_kind_of_device(machine, gpus, ranks, choice, types):
    """GPUs where each has one, else the CPU, on which four ranks of a laptop with one GPU can train."""
    taken = machine(gpus)
    devices = [choose_device(rank, ranks, DeviceChoice(choice)) for rank in range(ranks)]
    assert [device.type for device in devices] == types
    assert len(set(taken)) == len(taken) == types.count("cuda")


@pytest.mark.parametrize(("gpus", "fix"), [(0, "--device cpu"), (2, "--ranks 2, or --device cpu")])
def test_gpus_that_are_asked_for_and_missing_are_refused(machine, gpus, fix):
    machine(gpus)
    with pytest.raises(ConfigurationError, match="--device: cuda for 4 ranks") as caught:
        choose_device(0, 4, DeviceChoice.CUDA)
    assert str(caught.value).endswith(f"To fix: {fix}")


@pytest.mark.parametrize(
    ("kind", "limit", "ranks", "local_ranks", "variables", "threads"),
    [
        (CPU, None, 1, 1, {}, None),
        (CPU, None, 4, 4, {}, 1),
        (CPU, "max 100000", 4, 1, {}, 1),
        (CPU, "800000 100000", 4, 2, {}, 4),
        (CPU, "800000 100000", 1, 1, {}, 8),
        (CPU, "50000 100000", 2, 2, {}, 1),
        (CPU, "garbage", 2, 2, {}, 1),
        (GPU, None, 8, 8, {}, 2),
        (GPU, "400000 100000", 8, 2, {}, 2),
        (CPU, "800000 100000", 4, 2, {"OMP_NUM_THREADS": "3"}, None),
    ],
)
def test_a_rank_computes_with_its_part_of_the_cores(
    tmp_path, monkeypatch, kind, limit, ranks, local_ranks, variables, threads
):
    """Of 16 cores or of the container's limit; one thread of a CPU that is shared without a limit."""
    monkeypatch.setattr(device_module, "_CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    count = threads_of_rank(kind, ranks=ranks, local_ranks=local_ranks, environment=variables)
    assert count == threads


def test_gpus_that_lie_idle_are_told_once(machine, caplog):
    """By the first rank of the machine; where there is none, or none is wanted, nothing is said."""
    machine(2)
    for rank in range(4):
        choose_device(rank, 4)
        choose_device(rank, 4, DeviceChoice.CPU)
    machine(0)
    choose_device(0, 4)
    (said,) = caplog.messages
    assert said.startswith("2 GPUs for 4 ranks on this machine: all of them compute on the CPU. To fix: ")
