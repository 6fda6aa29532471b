"""Lightning with the client's callback.

Away from Ballast: ``python lightning_trainer.py --steps 200``
"""

import argparse
import os

import torch

try:
    from lightning.pytorch import LightningModule, Trainer
except ImportError:
    from pytorch_lightning import LightningModule, Trainer
from ballast_client.lightning import BallastCallback

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=int(os.environ.get("BALLAST_TOTAL_STEPS") or 200))
options = parser.parse_args()


class Regression(LightningModule):
    """A small network on samples that are made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The mean squared error of a batch."""
        (inputs,) = batch
        return (self.layers(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


ballast = BallastCallback(every=100)
trainer = Trainer(
    max_steps=options.steps,
    accelerator="auto",
    callbacks=[ballast],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
samples = torch.utils.data.TensorDataset(torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)))
trainer.fit(
    Regression(), torch.utils.data.DataLoader(samples, batch_size=32), ckpt_path=ballast.newest_checkpoint()
)
