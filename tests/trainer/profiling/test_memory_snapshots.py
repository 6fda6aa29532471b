"""Memory snapshots of ranks on GPUs, as asked of torch's allocator."""

import pytest
import torch
from ballast_policies.contract.job.output import ProfilingConfig
from ballast_trainer.errors import TrainerError
from ballast_trainer.profiling.torch_profile import StepProfiler


def fails_as(kind):
    if kind == "plain":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if kind == "wrapped":
        raise TrainerError("stage 1 cannot run") from torch.OutOfMemoryError("CUDA out of memory")
    raise ValueError("something else")


@pytest.mark.parametrize(("kind", "written"), [("plain", 1), ("wrapped", 1), ("other", 0)])
def test_running_out_of_memory_leaves_a_snapshot(monkeypatch, tmp_path, kind, written):
    """Also where the stage's trial has told of it; any other error leaves none."""
    asked = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", asked.append)
    config = ProfilingConfig(path=str(tmp_path), memory_snapshot=True)
    profiler = StepProfiler(config, rank=2, device=torch.device("cuda", 0))
    with pytest.raises((torch.OutOfMemoryError, TrainerError, ValueError)), profiler.on_out_of_memory():
        fails_as(kind)
    assert asked == [{"max_entries": 100_000}, *[str(tmp_path / "rank-2.memory.pickle")] * written]
