"""What a training job is: the part of ``TrainingJob.spec`` that the trainer acts on, and ``config.json``.

Each fact about a field stands here once: type, default, bounds, known names, description (the text under
it), and the rules over several fields.  The TrainingJob's schema, the trainer's configuration file and
the reference page are made from these classes.
"""

from ballast_policies.contract.job.dynamics import (
    AttentionSettings,
    Confidence,
    DepthsSettings,
    DynamicConfig,
    ExitsSettings,
    ExpertsSettings,
    FreezingCriterion,
    FreezingSettings,
    LoadBalance,
    Pattern,
    PruningSettings,
    Structure,
)
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.model import ColumnsConfig, DataConfig, ModelConfig
from ballast_policies.contract.job.output import (
    AsyncMode,
    CallbackConfig,
    CallbackError,
    CheckpointConfig,
    ExportConfig,
    ExportFormat,
    MetricsConfig,
    MlflowConfig,
    ProfilingConfig,
    WandbConfig,
)
from ballast_policies.contract.job.parallelism import (
    Imputation,
    ParallelismConfig,
    Selection,
    StragglerPolicy,
    StragglersConfig,
)
from ballast_policies.contract.job.pipeline import PipelineConfig, PlanConfig, PlannedGpus
from ballast_policies.contract.job.reshaping import BalanceBy, RebalanceConfig, RepackConfig
from ballast_policies.contract.job.training import (
    Decay,
    EvaluationConfig,
    Precision,
    TrainingConfig,
    WeightType,
)

__all__ = [
    "AsyncMode",
    "AttentionSettings",
    "BalanceBy",
    "CallbackConfig",
    "CallbackError",
    "CheckpointConfig",
    "ColumnsConfig",
    "Confidence",
    "DataConfig",
    "Decay",
    "DepthsSettings",
    "DynamicConfig",
    "EvaluationConfig",
    "ExitsSettings",
    "ExpertsSettings",
    "ExportConfig",
    "ExportFormat",
    "FreezingCriterion",
    "FreezingSettings",
    "Imputation",
    "JobConfig",
    "LoadBalance",
    "MetricsConfig",
    "MlflowConfig",
    "ModelConfig",
    "ParallelismConfig",
    "Pattern",
    "PipelineConfig",
    "PlanConfig",
    "PlannedGpus",
    "Precision",
    "ProfilingConfig",
    "PruningSettings",
    "RebalanceConfig",
    "RepackConfig",
    "Selection",
    "StragglerPolicy",
    "StragglersConfig",
    "Structure",
    "TrainingConfig",
    "WandbConfig",
    "WeightType",
]
