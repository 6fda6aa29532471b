"""Models of 200 MB, whose ranks note how much memory they have taken since they began to build one."""

import os
from pathlib import Path

import torch
from ballast_trainer.models.hugging_face import from_config, pretrained
from ballast_trainer.models.protocol import Model
from torch import nn

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
_BEGAN = [0]


def _anonymous():
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def noting_sgd(parameters, rate):
    """An optimizer; one is made for each layer that a rank has, when it has its weights."""
    Path(os.environ["NOTES"], os.environ["RANK"]).write_text(str(_anonymous() - _BEGAN[0]))
    return torch.optim.SGD(parameters, lr=rate)


def configured():
    from transformers import LlamaForCausalLM  # noqa: F401  (its import takes memory, too)

    _BEGAN[0] = _anonymous()
    return from_config(**LLAMA)


def read(checkpoint):
    from transformers import LlamaForCausalLM  # noqa: F401

    _BEGAN[0] = _anonymous()
    return pretrained(checkpoint=checkpoint)


def modules():
    _BEGAN[0] = _anonymous()
    layers = [nn.Linear(1800, 1800) for _ in range(16)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.02)
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=_numbers)


def _numbers(seed, step, size):
    return torch.ones(size, 1800), torch.zeros(size, 1800)
