"""Changes of a model while it trains, with the settings of each kind of change."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import RowFact, Rule, absent, at, given
from ballast_policies.contract.model import Arguments, Named, Settings
from ballast_policies.planning.dynamics import DYNAMICS


class Structure(enum.StrEnum):
    """Units that pruning removes."""

    WEIGHTS = "weights"
    NEURONS = "neurons"
    HEADS = "heads"


class FreezingCriterion(enum.StrEnum):
    """Measure by which a layer has learnt enough."""

    SCHEDULE = "schedule"
    WEIGHT_CHANGE = "weightChange"
    GRADIENT_NORM = "gradientNorm"
    PLASTICITY = "plasticity"


class Pattern(enum.StrEnum):
    """Rule for the keys that a query attends to."""

    BLOCKS = "blocks"
    HASH = "hash"


class Confidence(enum.StrEnum):
    """Measure of a position's confidence."""

    SATURATION = "saturation"
    HEAD = "head"
    SOFTMAX = "softmax"


class LoadBalance(enum.StrEnum):
    """Method that keeps a router from preferring a few experts."""

    LOSS = "loss"
    BIAS = "bias"
    NONE = "none"


class PruningSettings(Settings):
    """Weights to prune, and the schedule."""

    initial_sparsity: float = Field(0.0, ge=0, le=1)
    """Sparsity at ``startStep``, from which it grows to ``target``."""
    structure: Structure = Structure.WEIGHTS
    """``weights``: the smallest of all linear layers, whose products become sparse from 85 % on;
    ``neurons``: the weakest inner neurons of all blocks' MLPs, ``heads``: the weakest heads of all blocks'
    attention, whose products become smaller at any sparsity."""


class FreezingSettings(Settings):
    """Schedule or criterion of freezing layers; always a prefix of the layers, never the last one."""

    criterion: FreezingCriterion = FreezingCriterion.SCHEDULE
    """``schedule``: linearly in the steps; ``weightChange``: the relative change of a layer's weights since
    the last look, per step, is below ``threshold``; ``gradientNorm``: its gradients' norm is below
    ``threshold`` times that of its first looks; ``plasticity``: the slope of how much the likeness of its
    outputs to each other changes from look to look is below ``threshold`` times the largest slope yet
    (Egeria, with 0.2)."""
    threshold: float = Field(0.001, gt=0, le=1000)
    """Limit that the criterion compares with."""
    patience: int = Field(2, ge=1, le=1000)
    """Looks in a row at which the criterion has to hold."""
    thaw_steps: int | None = Field(None, ge=1, le=2**53)
    """Steps after which a frozen layer learns again, until the criterion holds again. Absent: never."""
    cache_bytes: int | None = Field(None, ge=1, le=2**53)
    """Bytes of the host's memory in which each rank keeps the outputs of frozen layers by sample: a sample
    that comes again, in the next epoch, passes them without being computed. Needs ``data`` that is a dataset,
    and no dropout in layers that freeze. Absent: frozen layers compute their forward in each step."""


class AttentionSettings(Settings):
    """Sparsity of attention, which is always causal."""

    pattern: Pattern = Pattern.BLOCKS
    """``blocks``: a block of queries attends to its own block of keys and to those others whose pooled scores
    make up ``coverage``; ``hash``: a query attends to the keys in its bucket of a random rotation, and to
    itself."""
    block_size: int = Field(16, ge=1, le=4096)
    """Positions in a block, of ``blocks``."""
    coverage: float = Field(0.9, gt=0, le=1)
    """Sum of the softmax of the pooled scores that a block of queries keeps, of ``blocks``."""
    buckets: int = Field(8, ge=2, le=4096)
    """Number of buckets of ``hash``; an even number is used."""


class ExitsSettings(Settings):
    """Early exits of positions from the layers."""

    RULES = (
        Rule(
            condition=given("vocabulary") | (at("confidence") != Confidence.SOFTMAX),
            field="vocabulary",
            reason="softmax needs the number of classes of the model's head",
            fix="vocabulary: 256 for model gpt; of a Hugging Face decoder its vocab_size",
        ),
    )

    confidence: Confidence = Confidence.SATURATION
    """``saturation``: the cosine of a position's state before and after a block; ``head``: a linear head
    before each block that learns whether the block would leave the state within ``saturation`` of itself;
    ``softmax``: by how much the likeliest class is ahead of the next, of an exit head after each block that
    learns from the model's targets."""
    threshold: float = Field(0.95, gt=0, le=1)
    """Confidence from which a position leaves."""
    saturation: float = Field(0.95, gt=0, le=1)
    """Cosine above which a state counts as unchanged, where ``head`` learns."""
    head_weight: float = Field(0.1, ge=0, le=1000)
    """Weight of the loss of ``head`` or of each exit head of ``softmax``, which trains earlier blocks too."""
    vocabulary: int | None = Field(None, ge=2, le=2**31 - 1)
    """Classes that ``softmax`` tells apart, as many as the model's head has."""
    rank: int = Field(32, ge=1, le=65_536)
    """Rank of ``softmax``'s exit heads: they map the state to this many numbers, and these to the classes."""
    sampled: float = Field(0.0, ge=0, le=1)
    """Fraction of the positions that leave at a layer drawn at random, so that the model's own loss trains
    every exit."""


class DepthsSettings(Settings):
    """Routing of positions around blocks; a routed block computes ``1 - target`` of them."""

    every_blocks: int = Field(2, ge=1, le=100_000)
    """One of this many blocks is routed."""
    predictor_weight: float = Field(0.01, ge=0, le=1000)
    """Weight of the loss of the predictor, which learns from a position alone whether the router picks it:
    the router compares positions of the whole sequence, which are not known when text is generated."""
    threshold: float | None = Field(None, ge=0, le=1)
    """Router's score, 0 to 1, below which a position passes by even where there is room for it; so the
    routers decide what their blocks compute, up to ``1 - target``. Absent: all room is used."""


class ExpertsSettings(Settings):
    """Experts: copies of a block's MLP, each as wide as it."""

    RULES = (
        Rule(
            condition=at("top_k") <= at("count"),
            field="top_k",
            reason="topK is above count",
            fix="lower topK",
        ),
    )

    count: int = Field(4, ge=2, le=1024)
    """Experts of a block."""
    top_k: int = Field(1, ge=1, le=1024)
    """Experts that each position goes to."""
    every_blocks: int = Field(2, ge=1, le=100_000)
    """One of this many blocks has experts."""
    first_layer: int = Field(0, ge=0, le=100_000)
    """Index of the first layer that may have experts; those before stay dense, as in DeepSeek-V3."""
    capacity_factor: float = Field(1.25, gt=0, le=1024)
    """Positions that an expert takes at most, over the mean, where ``dropTokens`` is true."""
    drop_tokens: bool = False
    """Positions above an expert's capacity pass it by. If not, capacity grows to the fullest expert."""
    balance: LoadBalance = LoadBalance.LOSS
    """``loss``: an auxiliary loss; ``bias``: a bias on the choice of experts, without a loss; or ``none``."""
    parallel: bool = False
    """The replicas of a stage (``parallelism.data``) share its experts: each has weights, gradients and
    optimizer state of its own ones alone, tokens travel to the rank of their expert and back, and where the
    tokens of ranks are uneven, experts move."""
    balance_weight: float = Field(0.01, ge=0, le=1000)
    """Weight of the auxiliary loss, or the step of the bias."""


_SECTIONS = {
    "pruning": "pruning",
    "freezing": "freezing",
    "attention": "sparseAttention",
    "exits": "earlyExit",
    "depths": "mixtureOfDepths",
    "experts": "mixtureOfExperts",
}
"""Field -> the kind that reads it."""

_BY_STEPS = RowFact("kind", DYNAMICS, lambda case: case.by_steps)
_CHOSEN_TARGET = RowFact("kind", DYNAMICS, lambda case: not case.needs_target)


class DynamicConfig(Settings):
    """One change of the model while it trains."""

    RULES = (
        Rule(
            condition=at("start_step") <= at("end_step"),
            field="end_step",
            reason="endStep is before startStep",
            fix="raise endStep",
        ),
        Rule(
            condition=given("target") | _CHOSEN_TARGET | given("freezing"),
            field="target",
            reason="this kind of change needs a target",
            fix="give target a value from 0 to 1",
        ),
        Rule(
            condition=_BY_STEPS | (absent("target") & absent("end_step") & (at("start_step") == 0)),
            field="kind",
            reason="this kind of change does not follow steps: it holds from the first step on",
            fix="leave startStep, endStep and target out",
        ),
        Rule(
            condition=at("pruning.initial_sparsity") <= at("target"),
            field="target",
            reason="target is below pruning.initialSparsity, and what is pruned does not come back",
            fix="raise target or lower initialSparsity",
        ),
        *(
            Rule(
                condition=absent(section) | at("kind").is_in([kind]),
                field=section,
                reason=f"{section} is read by kind: {kind} alone",
                fix=f"leave {section} out, or kind: {kind}",
            )
            for section, kind in _SECTIONS.items()
        ),
        Rule(
            condition=lambda config: not config.args or config.kind not in DYNAMICS.builtin,
            field="args",
            reason="args are for the kinds of other distributions",
            fix="leave args out",
        ),
    )

    kind: Annotated[str, Field(max_length=253), Named(DYNAMICS)]
    """Kind of change: a name under [Dynamics](#dynamics), or ``prefix.name`` of a distribution that is
    installed in the operator's and the trainer's image."""
    start_step: int = Field(0, ge=0, le=2**53)
    """First step that changes something."""
    end_step: int | None = Field(None, ge=0, le=2**53)
    """Step at which ``target`` is reached. Absent: at ``startStep``; for a criterion: the job's last step."""
    every_steps: int = Field(1, ge=1, le=2**31 - 1)
    """Steps between two changes, or two looks at a criterion."""
    target: float | None = Field(None, ge=0, le=1)
    """Strength reached at ``endStep``, 0 to 1: final sparsity, fraction of layers frozen, and the like. Where
    the model's own measurements decide, the most that may be reached; absent: 1."""
    pruning: PruningSettings | None = None
    """Weights to prune and the schedule, of ``kind: pruning``."""
    freezing: FreezingSettings | None = None
    """Schedule or criterion, of ``kind: freezing``."""
    attention: AttentionSettings | None = None
    """Sparsity, of ``kind: sparseAttention``."""
    exits: ExitsSettings | None = None
    """Early exits, of ``kind: earlyExit``."""
    depths: DepthsSettings | None = None
    """Routing of positions, of ``kind: mixtureOfDepths``."""
    experts: ExpertsSettings | None = None
    """The experts of ``kind: mixtureOfExperts``."""
    args: Arguments = Field(default_factory=dict)
    """Arguments of kinds from other distributions, which define what they read."""
