"""The table of dynamic cases: every kind of change that ``dynamics[].kind`` takes.

A row has no torch in it, so that operator and planner can read it; the trainer imports what ``build``
names when a job asks for the kind.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from ballast_policies.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCase:
    """Everything that is known about a kind of change while training.

    Attributes:
        summary: what changes and what ``target`` is, for the documentation.
        build: ``module:callable`` of the trainer's image: (configuration, number of layers) -> the change
            (``ballast_trainer.dynamics.protocol.Dynamic``).
        families: families of models that it can change; empty: all.
        inside_layers: it changes the inside of layers, so that tensor parallelism cannot cut them.
        compares_ranks: it compares weights over all ranks, so that no stage may have replicas.
        excludes: kinds that one job cannot have together with it -> why.
        stops_learning: layers stop learning from the front: the fraction ``target`` of them at the most.
        needs_target: ``target`` has to be given: nothing else decides how far the change goes.
        by_steps: it reads ``startStep``, ``endStep`` and ``target``; else it holds from the first step on.
    """

    summary: str
    build: str
    families: frozenset[str] = frozenset()
    inside_layers: bool = True
    compares_ranks: bool = False
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stops_learning: bool = False
    needs_target: bool = False
    by_steps: bool = True


_TRANSFORMER = frozenset({"transformer"})
_BOTH_ROUTE = "both route positions around blocks"

DYNAMICS = Registry(
    "kind of change",
    group="ballast.dynamics",
    row_type=DynamicCase,
    rows={
        "pruning": DynamicCase(
            summary="Gradual global magnitude pruning of weights, neurons or heads; `target` is the final "
            "sparsity.",
            build="ballast_trainer.dynamics.pruning.pruning:build_pruning",
            compares_ranks=True,
            needs_target=True,
        ),
        "freezing": DynamicCase(
            summary="Layers stop learning from the front, by steps or by a criterion; `target` is the "
            "fraction frozen at the end, or at most.",
            build="ballast_trainer.dynamics.freezing:Freezing",
            inside_layers=False,
            stops_learning=True,
            needs_target=True,
        ),
        "sparseAttention": DynamicCase(
            summary="Queries attend to the keys that their content chooses; `target` is the most that "
            "is left out.",
            build="ballast_trainer.dynamics.sparse_attention:SparseAttention",
            families=_TRANSFORMER,
        ),
        "earlyExit": DynamicCase(
            summary="Confident positions skip the layers that follow; `target` is the most that leave before "
            "the last layer.",
            build="ballast_trainer.dynamics.early_exit:EarlyExit",
            families=_TRANSFORMER,
            excludes={"mixtureOfDepths": _BOTH_ROUTE},
        ),
        "mixtureOfDepths": DynamicCase(
            summary="A block computes its router's picks only; `target` is the fraction that passes it by.",
            build="ballast_trainer.dynamics.mixture_of_depths:MixtureOfDepths",
            families=_TRANSFORMER,
            excludes={"earlyExit": _BOTH_ROUTE},
            needs_target=True,
        ),
        "mixtureOfExperts": DynamicCase(
            summary="MLPs become experts; each position goes to its best ones.",
            build="ballast_trainer.dynamics.mixture_of_experts:MixtureOfExperts",
            families=_TRANSFORMER,
            by_steps=False,
        ),
    },
)


def gradual_sparsity(progress: float, *, initial: float = 0.0, final: float = 0.9) -> float:
    """Zhu and Gupta's schedule: Sf + (Si - Sf) (1 - progress)^3 (DynMo supplement, equation 2)."""
    return final + (initial - final) * (1 - min(max(progress, 0.0), 1.0)) ** 3


def excluded_pair(kinds: Iterable[str]) -> tuple[str, str, str] | None:
    """Two of the kinds that one job cannot have together, and why; None: it can have all of them.

    Kinds that are not registered here are left to the trainer, whose image may have them.
    """
    named = sorted(set(kinds))
    for first in named:
        if first in DYNAMICS:
            for second in named:
                if second in DYNAMICS[first].excludes:
                    return first, second, DYNAMICS[first].excludes[second]
    return None
