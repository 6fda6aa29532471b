"""Members of a transformer block by which a dynamic case can change it: four.

A block implements those that its cases need; docs/trainer-changes.md has the table. :class:`Block` of our GPT
and the decoder layers of :mod:`ballast_trainer.models.hugging_face` have all of them.
"""

import dataclasses
import inspect
from typing import Any, Protocol

import torch
from torch import nn


class TransformerBlock(Protocol):
    """A layer from hidden states [B, S, D] to hidden states [B, S, D]; ``width`` is D."""

    width: int

    def run_at(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The block over some positions of each sequence, in ascending order, attending among these.

        Args:
            hidden: their states [B, n, D].
            positions: their places in the sequence [B, n], int64, for blocks that encode positions.
        """

    def mlp_path(self) -> str:
        """Path of the submodule that works position by position, [..., D] -> [..., D], e.g. ``mlp``."""

    def attention_path(self) -> str:
        """Path of the submodule that calls ``scaled_dot_product_attention``, causal and without a mask."""


MEMBERS = {
    "width": "the attribute width",
    "run_at": "the method run_at(hidden, positions)",
    "mlp_path": "the method mlp_path()",
    "attention_path": "the method attention_path()",
}
"""Members of :class:`TransformerBlock`, as messages name them."""


def lacking(module: nn.Module, members: tuple[str, ...]) -> str:
    """Members of ``members``, of :data:`MEMBERS`, that a layer lacks, as text; empty: none."""
    missing = [MEMBERS[name] for name in members if not hasattr(module, name)]
    if missing:
        return f"no {' and no '.join(text.removeprefix('the ') for text in missing)}"
    for name in members:
        if name.endswith("_path"):
            path = getattr(module, name)()
            try:
                module.get_submodule(path)
            except AttributeError:
                return f"no submodule {path!r}, which {name}() names"
    return ""


def is_conv1d(module: nn.Module) -> bool:
    """True if it is transformers' linear layer of GPT-2, which has inputs first."""
    return type(module).__name__ == "Conv1D"


_CHOICES = {"top_k_index", "router_indices"}
"""Names of transformers for the experts of each token, [tokens, k], where its fused experts take them."""


def chosen_experts_are_given(parts: list[nn.Module]) -> bool:
    """True if the one part of these that has the experts takes the choice, and computes the chosen rows."""
    return len(parts) == 1 and bool(_CHOICES & inspect.signature(type(parts[0]).forward).parameters.keys())


def experts_of(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer of transformers that compute experts, which it came with.

    Where each expert takes all tokens (Llama 4), their router: its scores are 0 for experts not chosen.
    """
    given = [part for part in layer.modules() if chosen_experts_are_given([part])]
    return given or [part for part in layer.modules() if _scores_all(part)]


def _scores_all(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and hasattr(part, "num_experts") and hasattr(part, "top_k")


def note_choices(layer: nn.Module) -> None:
    """Let a layer of transformers keep which experts its tokens have chosen last."""
    for part in experts_of(layer):
        if chosen_experts_are_given([part]):
            part.register_forward_pre_hook(_note, with_kwargs=True)
        else:
            part.register_forward_hook(_note_scores)


def _note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Counted where it is looked at: a count here would wait for the device in each forward.
    named = [kwargs[name] for name in _CHOICES if name in kwargs]
    part.__dict__["chosen_experts"] = (named[0] if named else args[1]).detach()


def _note_scores(part: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    part.__dict__["chosen_experts"] = output[0].detach().topk(part.top_k).indices


def _count_of_experts(part: Any) -> int:
    # LongCat-Flash counts those without weights apart.
    shared = part.__dict__.get("shared_experts")
    count: int = part.num_experts if hasattr(part, "num_experts") else part.total_experts
    return count if shared is None else shared.count


def expert_loads(layer: nn.Module) -> list[int]:
    """Tokens that chose each of a layer's own experts in its newest forward; empty: it has none."""
    parts: list[Any] = [part for part in layer.modules() if "chosen_experts" in part.__dict__]
    counts = [
        torch.bincount(part.chosen_experts.flatten(), minlength=count)[:count].tolist()
        for part, count in ((part, _count_of_experts(part)) for part in parts)
        if not part.chosen_experts.is_meta
    ]
    return [sum(column) for column in zip(*counts, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Lacking:
    """Reason that the layer ``layer``, of class ``kind``, cannot be changed: it has no ``what``."""

    layer: int
    kind: str
    what: str


def described(reasons: list[Lacking]) -> str:
    """The reasons as text, layers of a kind together: ``layers 1 to 4 (MyBlock) have no ...``."""
    groups: dict[tuple[str, str], list[int]] = {}
    for reason in reasons:
        groups.setdefault((reason.kind, reason.what), []).append(reason.layer)
    texts = []
    for (kind, what), layers in groups.items():
        first, last = layers[0], layers[-1]
        which = f"layer {first}" if first == last else f"layers {first} to {last}"
        texts.append(f"{which} ({kind}) {'has' if first == last else 'have'} {what}")
    return "; ".join(texts)
