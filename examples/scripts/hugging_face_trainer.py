"""Hugging Face's Trainer with the client's callback: two lines, and it is paused, resumed and measured.

Away from Ballast: ``python hugging_face_trainer.py --steps 200 --output checkpoints``
"""

import argparse
import os

import torch
from ballast_client.hugging_face import BallastCallback, newest_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=int(os.environ.get("BALLAST_TOTAL_STEPS") or 200))
parser.add_argument("--output", default=os.environ.get("BALLAST_CHECKPOINT_PATH") or "checkpoints")
options = parser.parse_args()


class Words(torch.utils.data.Dataset):
    """Sequences in which each token is the one before plus one: small enough to learn at once."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    logging_steps=10,
    save_steps=100,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Words(), callbacks=[BallastCallback()])
trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))
