"""Rules over several parts of a job.

Kinds of change that it cannot have together, or with its model; ranks that fill whole pods, with a tensor
group in one pod; and what has no effect in a job without a model, which runs its template's own command.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ballast_policies.contract.conditions import AtDefaults, Condition, ItemRows, Items, Rule, at, given
from ballast_policies.contract.errors import camel
from ballast_policies.contract.job.dynamics import FreezingCriterion
from ballast_policies.contract.job.model import FAMILIES
from ballast_policies.contract.job.pipeline import ParallelismConfig, PipelineConfig
from ballast_policies.contract.job.training import WeightType
from ballast_policies.contract.model import Settings
from ballast_policies.planning.dynamics import DYNAMICS, excluded_pair
from ballast_policies.planning.schedules.registry import SCHEDULES, ScheduleKind


def _exclusions() -> tuple[Rule, ...]:
    """Kinds of change that one job cannot have together: a rule for each pair of ours, and one for all."""

    def without(kind: str) -> Condition:
        excluded = DYNAMICS.builtin[kind]
        return ItemRows("dynamics", DYNAMICS, lambda case: case is not excluded, "kind")

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


def _excluded(config: Any) -> tuple[str, str, str] | None:
    return excluded_pair(change.kind for change in config.dynamics)


def _shares_experts(config: Any) -> bool:
    return any(change.experts is not None and change.experts.parallel for change in config.dynamics)


def _freezes_by(config: Any, criterion: FreezingCriterion) -> bool:
    changes = (change.freezing for change in config.dynamics)
    return any(freezing is not None and freezing.criterion is criterion for freezing in changes)


def _caches_outputs(config: Any) -> bool:
    changes = (change.freezing for change in config.dynamics)
    return any(freezing is not None and freezing.cache_bytes is not None for freezing in changes)


def _own_row(schedule: str, holds: Callable[[ScheduleKind], bool]) -> bool:
    """True if the schedule is one of Ballast's own, and of such a kind."""
    kind = SCHEDULES.builtin.get(schedule)
    return kind is not None and holds(kind)


def _needs_no_gradients(case: Any) -> bool:
    return any(case is row for row in DYNAMICS.builtin.values()) and not case.compares_ranks


OPTIMIZER_RULES = (
    Rule(
        condition=lambda config: (
            config.parallelism.zero_stage < 3
            or not (_caches_outputs(config) or _freezes_by(config, FreezingCriterion.PLASTICITY))
        ),
        field="parallelism.zero_stage",
        reason="frozen outputs and plasticity run layers apart from the replicas, which have parts of their "
        "weights",
        fix="zeroStage: 2, or leave freezing.cacheBytes out and take another freezing.criterion",
    ),
    Rule(
        condition=(at("parallelism.zero_stage") == 0)
        | ItemRows("dynamics", DYNAMICS, _needs_no_gradients, "kind"),
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
    ),
    Rule(
        condition=(at("training.dtype") == WeightType.FP32)
        | (at("training.master_weights") == False)  # noqa: E712 - a comparison as a value
        | ItemRows("dynamics", DYNAMICS, _needs_no_gradients, "kind"),
        field="training.master_weights",
        reason="changes of your own, and pruning, write to weights, which their fp32 copies replace",
        fix="masterWeights: false, or leave the change out",
    ),
    Rule(
        condition=(at("training.dtype") == WeightType.FP32)
        | ItemRows("dynamics", DYNAMICS, lambda case: case is not DYNAMICS.builtin["pruning"], "kind"),
        field="training.dtype",
        reason="pruning orders weights by their fp32 magnitudes, and multiplies sparse ones in fp32",
        fix="leave dtype out, or pruning",
    ),
    Rule(
        condition=lambda config: (
            config.parallelism.zero_stage == 0 or not _freezes_by(config, FreezingCriterion.GRADIENT_NORM)
        ),
        field="parallelism.zero_stage",
        reason="freezing.criterion gradientNorm reads whole gradients, of which a replica has a part with "
        "zeroStage",
        fix="freezing.criterion: weightChange, or zeroStage: 0",
    ),
)
"""Changes that read gradients or state of the optimizer, of which a replica may have a part alone."""


def _where_outputs_are_kept(holds: Callable[[Any], bool], reason: str, fix: str) -> Rule:
    return Rule(
        condition=lambda config: not _caches_outputs(config) or holds(config),
        field="dynamics",
        reason=f"freezing.cacheBytes keeps outputs {reason}",
        fix=f"{fix}, or leave cacheBytes out",
    )


def _suits(family: str) -> Rule:
    """Changes of transformer blocks, and the registered models that have none."""
    names = sorted(name for name, of in FAMILIES.items() if of == family)
    transformers = " or ".join(name for name, of in FAMILIES.items() if of == "transformer")
    return Rule(
        condition=at("model.name").is_not_in(names)
        | ItemRows("dynamics", DYNAMICS, lambda case: not case.families or family in case.families, "kind"),
        field="dynamics",
        reason=f"this change is one of transformer blocks, which models of the family {family} have not",
        fix=f"leave it out, or model.name: {transformers}, or a transformer of yours",
    )


def _reads_each_expert(config: Any) -> bool:
    """True if a change reads weights, gradients or optimizer state of all experts, or runs layers apart."""
    criteria = (of.criterion for change in config.dynamics if (of := change.freezing) is not None)
    return (
        _caches_outputs(config)
        or any(criterion is not FreezingCriterion.SCHEDULE for criterion in criteria)
        or any(not _needs_no_gradients(DYNAMICS.builtin.get(change.kind)) for change in config.dynamics)
    )


CHANGE_RULES = (
    *_exclusions(),
    Rule(
        condition=lambda config: not _shares_experts(config) or not _reads_each_expert(config),
        field="dynamics",
        reason="with experts.parallel each expert is on one replica, and pruning, changes of your own, "
        "frozen outputs and measured criteria of freezing read those of all",
        fix="freezing.criterion: schedule without cacheBytes, or leave parallel or the other change out",
    ),
    Rule(
        condition=lambda config: config.parallelism.data > 1 or not _shares_experts(config),
        field="dynamics",
        reason="experts.parallel shares experts between the replicas of a stage, and there is one",
        fix="parallelism: {data: 2} or more, or leave parallel out",
    ),
    Rule(
        condition=lambda config: (
            not _shares_experts(config)
            or not _own_row(config.pipeline.schedule, lambda kind: kind.splits_backward or kind.asynchronous)
        ),
        field="dynamics",
        reason="experts.parallel exchanges tokens in each forward and backward, and replicas under this "
        "schedule do not compute the same at the same time",
        fix="pipeline.schedule: 1F1B",
        explain=lambda config: (
            "experts.parallel exchanges tokens in each forward and backward, and "
            f"replicas under {config.pipeline.schedule} do not compute the same at the same time"
        ),
    ),
    _where_outputs_are_kept(
        lambda config: config.data is not None,
        "by sample, and those of the model's own data may not repeat",
        "data.name: a dataset with len() and [index]",
    ),
    _where_outputs_are_kept(
        lambda config: len(config.dynamics) == 1,
        "of frozen layers, which other changes would change",
        "freezing alone",
    ),
    _where_outputs_are_kept(
        lambda config: config.parallelism.tensor == 1,
        "of whole layers, and parallelism.tensor cuts them",
        "tensor: 1",
    ),
    _where_outputs_are_kept(
        lambda config: not _own_row(config.pipeline.schedule, lambda kind: kind.asynchronous),
        "of one step at a time, and here several are in flight",
        "a schedule with a flush, e.g. 1F1B",
    ),
    Rule(
        condition=lambda config: (
            not _freezes_by(config, FreezingCriterion.PLASTICITY) or set(config.pipeline.replicas) <= {1}
        ),
        field="dynamics",
        reason="plasticity compares layers on one sequence, and pipeline.replicas of a stage see different "
        "ones",
        fix="freezing.criterion: weightChange or gradientNorm, or parallelism.data in place of replicas",
    ),
    *(_suits(family) for family in sorted({*FAMILIES.values()} - {"transformer"})),
)
"""Changes that a job cannot have together, or with its replicas, its schedule, its data or its model."""


_COLUMN = at("parallelism.tensor") * at("parallelism.data")
_FIELD = "parallelism.gpus_per_pod"


def _fills_pods(config: Any) -> bool:
    pipeline: PipelineConfig = config.pipeline
    parallelism: ParallelismConfig = config.parallelism
    if pipeline.used_replicas:
        return sum(pipeline.used_replicas) % parallelism.ranks_per_pod == 0
    most = pipeline.max_stages or max(pipeline.min_stages, parallelism.ranks_per_pod)
    sizes = (stages * parallelism.ranks_per_position for stages in range(pipeline.min_stages, most + 1))
    return any(ranks % parallelism.ranks_per_pod == 0 for ranks in sizes)


def _explain_partial_pods(config: Any) -> str:
    pipeline, parallelism = config.pipeline, config.parallelism
    pods = f"pods of gpusPerPod: {parallelism.ranks_per_pod}"
    if pipeline.used_replicas:
        return f"the {sum(pipeline.used_replicas)} ranks of pipeline.replicas do not fill {pods}"
    return (
        f"no number of stages from minStages: {pipeline.min_stages} to maxStages: {pipeline.max_stages}, "
        f"with {parallelism.ranks_per_position} ranks each, fills {pods}"
    )


POD_RULES = (
    Rule(
        condition=(at(_FIELD) == 1) | (at(_FIELD) % at("parallelism.tensor") == 0),
        field=_FIELD,
        reason="gpusPerPod is not a multiple of parallelism.tensor: a tensor group stays inside a pod",
        fix="choose a multiple of tensor, or 1 for groups over the network",
    ),
    Rule(
        condition=Items("pipeline.replicas", 1, negated=True)
        | (at(_FIELD) <= at("pipeline.max_stages") * _COLUMN),
        field=_FIELD,
        reason="a pod has more GPUs than the largest gang has ranks",
        fix="lower gpusPerPod, or raise pipeline.maxStages",
    ),
    Rule(
        condition=at("repack.target_stages") * _COLUMN % at(_FIELD) == 0,
        field="repack.target_stages",
        reason="the ranks of repack.targetStages do not fill whole pods of gpusPerPod, and a part of a pod "
        "cannot be released",
        fix="choose targetStages so that its ranks are a multiple of gpusPerPod",
    ),
    # CEL has no ranges of numbers.
    Rule(
        condition=_fills_pods,
        field=_FIELD,
        reason="the ranks do not fill whole pods",
        fix="choose gpusPerPod so that a number of ranks that the job may have is a multiple of it",
        explain=_explain_partial_pods,
    ),
)


KEPT = {"pipeline": ("min_stages", "max_stages"), "parallelism": ("gpus_per_pod",)}
"""Part -> fields of it that hold for every job: the fewest and the most ranks, and how many share a pod."""


def with_model_only(**parts: type | None) -> Iterator[Rule]:
    """Rules, for each part of a configuration, that a job without a model leaves it at its defaults.

    What the API server has filled in cannot be told from what the user wrote, so a value that equals the
    default is allowed.

    Args:
        parts: field of the configuration -> its class, ``tuple``, or None where its default is none.
    """
    for name, kind in parts.items():
        leaves = tuple(_leaves(name, kind))
        kept = KEPT.get(name, ())
        only = f", except {' and '.join(camel(field) for field in kept)}" if kept else ""
        yield Rule(
            condition=given("model") | AtDefaults(leaves),
            field=name,
            reason=f"a job without a model runs its template's own command, where {name} has no effect{only}",
            fix="leave it out, or name a model",
        )


def _leaves(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """(dotted path, default) of every field of the part."""
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        yield path, None if kind is None else kind()
        return
    for name, field in kind.model_fields.items():
        inner, part = f"{path}.{name}", field.annotation
        if name in KEPT.get(path, ()):
            continue
        if isinstance(part, type) and issubclass(part, Settings):
            yield from _leaves(inner, part)
        else:
            yield inner, field.get_default(call_default_factory=True)
