"""Names and shapes that a changed layer's tensors have in the model as the user wrote it."""

import dataclasses
from collections.abc import Sequence

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, Structure
from torch import nn

from ballast_trainer.dynamics.pruning.neurons import origin_of
from ballast_trainer.dynamics.registry import build_dynamic
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.without_memory import layer_without_memory


@dataclasses.dataclass(slots=True)
class PlainNames:
    """The tensors of a layer before changes prepared it.

    Attributes:
        tensors: by name; held, so that no other tensor gets the identity of one that a change has replaced.
    """

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> "PlainNames":
        """Before any change."""
        return cls(module.state_dict(keep_vars=True))

    def now(self, module: nn.Module) -> tuple[dict[str, str], set[str]]:
        """Of the prepared layer's tensors: plain name by the present one, and those that are transposed now.

        A tensor that a change has added keeps its name.
        """
        plain = {id(value): name for name, value in self.tensors.items()}
        names, transposed = {}, set()
        for name, value in module.state_dict(keep_vars=True).items():
            origin = origin_of(value)
            names[name] = plain.get(id(value if origin is None else origin), name)
            if origin is not None and value.dim() > 1:
                transposed.add(name)
        return names, transposed

    def added(self, module: nn.Module) -> list[str]:
        """Names of the prepared layer's parameters that it did not have."""
        known = {id(value) for value in self.tensors.values()}
        return [
            name
            for name, value in module.named_parameters()
            if id(value) not in known and id(origin_of(value)) not in known
        ]


def check_unchanged_names(model: Model, configs: Sequence[DynamicConfig]) -> None:
    """Refuse to export a model of Hugging Face's as a folder where it gets or loses tensors.

    Raises:
        ConfigurationError: names the change and a tensor.
    """
    for config in configs:
        what = ""
        if config.pruning is not None and config.pruning.structure is not Structure.WEIGHTS:
            what = f"removes {config.pruning.structure}"
        change = build_dynamic(config, model.layer_count)
        for index in range(0 if what else model.layer_count):
            module = layer_without_memory(model, index)
            plain = PlainNames.of(module)
            added = plain.added(change.prepare(index, module))
            if added:
                what = f"adds {added[0]!r} to layer {index}"
                break
        if what:
            raise ConfigurationError(
                "export.format",
                f"huggingFace is a folder of the model as it was, and {config.kind} {what}. "
                "To fix: safetensors or torch",
            )
