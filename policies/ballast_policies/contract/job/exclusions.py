"""Kinds of change that one job cannot have together, or with its model."""

from collections.abc import Callable
from typing import Any

from ballast_policies.contract.conditions import Condition, at
from ballast_policies.contract.job.changes import FreezingCriterion
from ballast_policies.contract.job.model import FAMILIES
from ballast_policies.contract.job.training import WeightType
from ballast_policies.contract.row_conditions import each_row
from ballast_policies.contract.rules import Rule
from ballast_policies.planning.dynamics import DYNAMICS, excluded_pair
from ballast_policies.planning.schedules.registry import SCHEDULES


def exclusions() -> tuple[Rule, ...]:
    """Kinds of change that one job cannot have together: a rule for each pair of ours, and one for all."""

    def without(kind: str) -> Condition:
        excluded = DYNAMICS.builtin[kind]
        return each_row("dynamics", "kind", DYNAMICS, lambda case: case is not excluded)

    pairs = {
        tuple(sorted((first, second))): why
        for first, case in DYNAMICS.builtin.items()
        for second, why in case.excludes.items()
        if second in DYNAMICS.builtin
    }
    fix = "leave one of them out"
    ours = [
        Rule(
            condition=without(first) | without(second),
            field="dynamics",
            reason=f"{first} and {second} exclude each other: {why}",
            fix=fix,
        )
        for (first, second), why in pairs.items()
    ]
    every = Rule(
        condition=lambda config: _excluded(config) is None,
        field="dynamics",
        reason="two of these changes exclude each other",
        fix=fix,
        explain=lambda config: "{} and {} exclude each other: {}".format(*(_excluded(config) or ())),
    )
    return (*ours, every)


def sharing_experts() -> tuple[Rule, ...]:
    """Experts that replicas share need replicas, which run the same microbatch at the same time."""
    return (
        Rule(
            condition=lambda config: config.parallelism.data > 1 or not _shares_experts(config),
            field="dynamics",
            reason="experts.parallel shares experts between the replicas of a stage, and there is one",
            fix="parallelism: {data: 2} or more, or leave parallel out",
            explain=lambda config: (
                "experts.parallel shares experts between the replicas of a stage, and there is one"
            ),
        ),
        Rule(
            condition=lambda config: not _shares_experts(config) or _in_step(config.pipeline.schedule),
            field="dynamics",
            reason="experts.parallel exchanges tokens in each forward and backward, and replicas under this "
            "schedule do not compute the same at the same time",
            fix="pipeline.schedule: 1F1B",
            explain=lambda config: (
                "experts.parallel exchanges tokens in each forward and backward, and "
                f"replicas under {config.pipeline.schedule} do not compute the same at the same time"
            ),
        ),
    )


def _shares_experts(config: Any) -> bool:
    return any(change.experts is not None and change.experts.parallel for change in config.dynamics)


def _in_step(schedule: str) -> bool:
    kind = SCHEDULES.builtin.get(schedule)
    return kind is None or not (kind.splits_backward or kind.asynchronous)


def comparing_sequences() -> tuple[Rule, ...]:
    """Plasticity compares a layer on one sequence, which replicas of a stage would each choose for itself."""
    reason = "plasticity compares layers on one sequence, and pipeline.replicas of a stage see different ones"
    return (
        Rule(
            condition=lambda config: not _compares_sequences(config) or set(config.pipeline.replicas) <= {1},
            field="dynamics",
            reason=reason,
            fix="freezing.criterion: weightChange or gradientNorm, or parallelism.data in place of replicas",
            explain=lambda _: reason,
        ),
    )


def sharing_optimizers() -> tuple[Rule, ...]:
    """Changes that read gradients or state of the optimizer, of which a replica may have a part alone."""
    shared = at("parallelism.zero_stage") == 0
    reason = (
        "freezing.criterion gradientNorm reads whole gradients, of which a replica has a part with zeroStage"
    )
    return (
        Rule(
            condition=shared | each_row("dynamics", "kind", DYNAMICS, _needs_no_gradients),
            field="parallelism.zero_stage",
            reason="pruning and changes of your own use whole gradients and the optimizer's whole state, of "
            "which a replica has a part with zeroStage",
            fix="zeroStage: 0, or leave the change out",
        ),
        Rule(
            condition=lambda config: config.parallelism.zero_stage < 2 or not _shares_experts(config),
            field="parallelism.zero_stage",
            reason="with experts.parallel a step's whole gradients are summed, once",
            fix="zeroStage: 1, or leave parallel out",
            explain=lambda _: "with experts.parallel a step's whole gradients are summed, once",
        ),
        Rule(
            condition=(at("training.dtype") == WeightType.FP32)
            | (at("training.master_weights") == False)  # noqa: E712 - a comparison as a value
            | each_row("dynamics", "kind", DYNAMICS, _needs_no_gradients),
            field="training.master_weights",
            reason="changes of your own, and pruning, write to weights, which their fp32 copies replace",
            fix="masterWeights: false, or leave the change out",
        ),
        Rule(
            condition=(at("training.dtype") == WeightType.FP32)
            | each_row("dynamics", "kind", DYNAMICS, lambda case: case is not DYNAMICS.builtin["pruning"]),
            field="training.dtype",
            reason="pruning orders weights by their fp32 magnitudes, and multiplies sparse ones in fp32",
            fix="leave dtype out, or pruning",
        ),
        Rule(
            condition=lambda config: shared.holds(config) or not _compares_gradients(config),
            field="parallelism.zero_stage",
            reason=reason,
            fix="freezing.criterion: weightChange, or zeroStage: 0",
            explain=lambda _: reason,
        ),
    )


def _needs_no_gradients(case: Any) -> bool:
    return any(case is row for row in DYNAMICS.builtin.values()) and not case.compares_ranks


def _compares_gradients(config: Any) -> bool:
    changes = (change.freezing for change in config.dynamics)
    return any(f is not None and f.criterion is FreezingCriterion.GRADIENT_NORM for f in changes)


def _compares_sequences(config: Any) -> bool:
    changes = (change.freezing for change in config.dynamics)
    return any(f is not None and f.criterion is FreezingCriterion.PLASTICITY for f in changes)


def caching_outputs() -> tuple[Rule, ...]:
    """Outputs of frozen layers are kept where they are a function of a sample that comes again."""
    needs: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
        (
            lambda config: config.data is not None,
            "freezing.cacheBytes keeps outputs by sample, and those of the model's own data may not repeat",
            "data.name: a dataset with len() and [index], or leave cacheBytes out",
        ),
        (
            lambda config: len(config.dynamics) == 1,
            "freezing.cacheBytes keeps outputs of frozen layers, which other changes would change",
            "freezing alone, or leave cacheBytes out",
        ),
        (
            lambda config: config.parallelism.tensor == 1,
            "freezing.cacheBytes keeps outputs of whole layers, and parallelism.tensor cuts them",
            "tensor: 1, or leave cacheBytes out",
        ),
        (
            lambda config: not _is_asynchronous(config.pipeline.schedule),
            "freezing.cacheBytes keeps outputs of one step at a time, and here several are in flight",
            "a schedule with a flush, e.g. 1F1B, or leave cacheBytes out",
        ),
    )
    return tuple(_where_outputs_are_kept(*need) for need in needs)


def _where_outputs_are_kept(holds: Callable[[Any], bool], reason: str, fix: str) -> Rule:
    return Rule(
        condition=lambda config: not _caches_outputs(config) or holds(config),
        field="dynamics",
        reason=reason,
        fix=fix,
        explain=lambda _: reason,
    )


def _caches_outputs(config: Any) -> bool:
    changes = (change.freezing for change in config.dynamics)
    return any(freezing is not None and freezing.cache_bytes is not None for freezing in changes)


def _is_asynchronous(schedule: str) -> bool:
    kind = SCHEDULES.builtin.get(schedule)
    return kind is not None and kind.asynchronous


def suiting_families() -> tuple[Rule, ...]:
    """Changes of transformer blocks, and the registered models that have none."""
    return tuple(_suits(family) for family in sorted({*FAMILIES.values()} - {"transformer"}))


def _suits(family: str) -> Rule:
    names = sorted(name for name, of in FAMILIES.items() if of == family)
    transformers = " or ".join(name for name, of in FAMILIES.items() if of == "transformer")
    return Rule(
        condition=at("model.name").is_not_in(names)
        | each_row("dynamics", "kind", DYNAMICS, lambda case: not case.families or family in case.families),
        field="dynamics",
        reason=f"this change is one of transformer blocks, which models of the family {family} have not",
        fix=f"leave it out, or model.name: {transformers}, or a transformer of yours",
    )


def _excluded(config: Any) -> tuple[str, str, str] | None:
    return excluded_pair(change.kind for change in config.dynamics)
