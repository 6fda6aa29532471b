"""Plain data parallelism: torch's own DistributedDataParallel, and the client's lines around it.

Away from Ballast: ``torchrun --nproc-per-node 2 plain_ddp.py --steps 200``
"""

import argparse
from pathlib import Path

import ballast_client
import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, help="steps of the job; in a TrainingJob: spec.totalSteps")
options = parser.parse_args()

cuda = torch.cuda.is_available()
torch.distributed.init_process_group("nccl" if cuda else "gloo")
rank = torch.distributed.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parallel = DistributedDataParallel(model)


def save(path: Path) -> None:
    """Write a checkpoint; rank 0 is asked to."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path: Path) -> None:
    """Read one; every rank is asked to."""
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


job = ballast_client.Job()
for step in job.steps(options.steps, load=load, save=save):
    # The step determines the samples, so that a job that resumes sees those that come next.
    generator = torch.Generator().manual_seed(step * torch.distributed.get_world_size() + rank)
    inputs = torch.randn(32, 16, generator=generator).to(device)
    loss = (parallel(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        job.report(loss=loss.item())
torch.distributed.destroy_process_group()
