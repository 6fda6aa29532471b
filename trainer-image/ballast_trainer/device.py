"""The device that a rank computes on, and how many of the machine's cores it uses."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ballast_trainer.environment import DeviceChoice
from ballast_trainer.errors import ConfigurationError

logger = logging.getLogger(__name__)

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def choose_device(
    local_rank: int, local_ranks: int = 1, choice: DeviceChoice = DeviceChoice.AUTO
) -> torch.device:
    """The device of one of ``local_ranks`` ranks on this machine; all of them choose alike.

    Raises:
        ConfigurationError: GPUs are asked for, and there are fewer than ranks: NCCL takes no GPU twice.
    """
    gpus = 0 if choice is DeviceChoice.CPU or not torch.cuda.is_available() else torch.cuda.device_count()
    if gpus >= local_ranks:
        device = torch.device("cuda", local_rank)
        # Of eight queues, the default, one kernel that waits for a message would hold up others behind it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device)
        return device
    some = "no GPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    if choice is DeviceChoice.CUDA:
        ranks = "1 rank" if local_ranks == 1 else f"{local_ranks} ranks"
        raise ConfigurationError(
            "--device",
            f"cuda for {ranks} on a machine with {some}, and each needs one of its own. "
            f"To fix: {f'--ranks {gpus}, or ' if gpus else ''}--device cpu",
        )
    if gpus and local_rank == 0:
        logger.warning(
            "%s for %d ranks on this machine: all of them compute on the CPU. To fix: at most %d ranks here, "
            "or --device cpu",
            some,
            local_ranks,
            gpus,
        )
    return torch.device("cpu")


def sparse_pays_on(device: torch.device) -> bool:
    """True if work on chosen weights or keys alone can be faster there than dense work.

    Not on GPUs. On an H100, CSR products took 16 to 56 times as long as dense ones in bf16 with a tenth of
    the weights kept, and 4 to 17 times with a hundredth (fp32: 2 to 4, and 0.7 to 1.3); chosen keys 6 to 50
    times as long as dense attention, up to 2,048 positions (``benchmarks/trainer/sparse.py`` and
    ``dynamic_models/sparse_attention.py`` with ``--device cuda``).
    """
    return device.type != "cuda"


def peak_memory(device: torch.device) -> int:
    """Most bytes that tensors have taken there at once, of torch's allocator; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def threads_of_rank(
    device: torch.device, *, ranks: int, local_ranks: int, environment: Mapping[str, str]
) -> int | None:
    """Threads with which one rank computes on the CPU; None: as torch chooses.

    Ranks of one machine share its cores. On a CPU a rank has its part of the container's limit, and one
    thread without a limit, since other pods may be on the node; beside a GPU it has its part of all cores.

    ``local_ranks``: those in this pod, or on this machine outside of pods. OMP_NUM_THREADS of the environment
    is left as it is.
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    limit = _cpu_limit()
    if limit is None and ranks == 1:
        return None
    if limit is None and device.type == "cpu":
        return 1
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, limit if limit is not None else cores) / local_ranks))


def _cpu_limit() -> float | None:
    """Cores that the container may use (cgroup v2); None: no limit, or none that can be read."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
