"""One full example of each message; the golden files hold their bytes."""

from collections.abc import Iterator

from ballast_policies.contract.job.dynamics import DynamicConfig
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
from ballast_policies.contract.job.pipeline import (
    BalanceBy,
    Imputation,
    ParallelismConfig,
    PipelineConfig,
    RebalanceConfig,
    RepackConfig,
    Selection,
    StragglerPolicy,
    StragglersConfig,
)
from ballast_policies.contract.job.training import (
    Decay,
    EvaluationConfig,
    Precision,
    TrainingConfig,
    WeightType,
)
from ballast_policies.contract.messages import (
    Ack,
    Candidate,
    ExitReason,
    Proposal,
    Rank,
    Report,
    SlowRank,
    Stage,
    TerminationMessage,
    Tried,
)
from ballast_policies.contract.model import Settings
from ballast_policies.contract.plan import Directive, Plan

STAGES = (
    Stage(rank=0, first_layer=0, end_layer=3),
    Stage(rank=1, first_layer=3, end_layer=8),
)

EXAMPLES = {
    "config": JobConfig(
        total_steps=1000,
        model=ModelConfig(name="gpt", args={"width": 64}, layers=16),
        pipeline=PipelineConfig(
            min_stages=2,
            max_stages=4,
            microbatches=16,
            global_batch_size=64,
            schedule="Interleaved1F1B",
            stages_per_rank=2,
        ),
        parallelism=ParallelismConfig(
            tensor=2,
            data=2,
            gpus_per_pod=4,
            scatter_gather=False,
            zero_stage=1,
            stragglers=StragglersConfig(
                policy=StragglerPolicy.SEMI,
                selection=Selection.RANDOM,
                differentiated=True,
                imputation=Imputation.AVERAGE,
                epoch_steps=10,
                tolerance=0.1,
            ),
        ),
        dynamics=(DynamicConfig(kind="freezing", start_step=10, end_step=500, every_steps=5, target=0.5),),
        rebalance=RebalanceConfig(
            enabled=False,
            every_steps=30,
            min_gain=0.1,
            balancer="diffusion",
            by=BalanceBy.PARAMETERS,
            memory_bytes=2**33,
        ),
        repack=RepackConfig(enabled=True, min_stages=2, target_stages=3, every_steps=40, max_slowdown=0.25),
        training=TrainingConfig(
            seed=7,
            learning_rate=0.01,
            weight_decay=0.1,
            warmup_steps=20,
            decay=Decay.COSINE,
            decay_steps=900,
            decay_to=0.1,
            clip_norm=0.5,
            optimizer="my.optimizers:lion",
            precision=Precision.BF16,
            dtype=WeightType.BF16,
            master_weights=False,
            compile=True,
            dataloader_num_workers=2,
            skip_bad_samples=3,
            group_by_length=True,
            deterministic=True,
            recompute=True,
            recompute_every=2,
            comm_timeout_seconds=900.0,
            compile_timeout_seconds=1800.0,
        ),
        data=DataConfig(
            name="my.data:windows",
            args={"path": "/data"},
            columns=ColumnsConfig(inputs="input_ids", targets="labels"),
            pad_to_multiple_of=64,
            packing=True,
            shift_labels=True,
        ),
        checkpoint=CheckpointConfig(
            path="/checkpoints",
            every_steps=50,
            keep=3,
            start_over=True,
            retry_seconds=30.0,
            async_mode=AsyncMode.DISABLED,
            in_memory_every_steps=4,
        ),
        metrics=MetricsConfig(
            port=9464,
            json_lines="/logs/steps.jsonl",
            tensorboard="/logs/tb",
            writer="my.metrics:Writer",
            wandb=WandbConfig(project="translators", entity="team", name="first"),
            mlflow=MlflowConfig(tracking_uri="http://mlflow:5000", experiment="translators", name="first"),
        ),
        profiling=ProfilingConfig(
            path="/logs/traces", first_step=20, steps=3, ranks=(0, 3), memory_snapshot=True
        ),
        evaluation=EvaluationConfig(
            every_steps=200,
            batches=8,
            timeout_seconds=1200.0,
            data=DataConfig(
                name="my.data:windows",
                args={"path": "/held-out"},
                columns=ColumnsConfig(inputs="input_ids", targets="labels"),
                collate="my.data:padded",
            ),
        ),
        callback=CallbackConfig(
            name="my.callbacks:notify",
            args={"channel": "runs"},
            every_rank=True,
            on_error=CallbackError.REPORT,
            timeout_seconds=300.0,
        ),
        export=ExportConfig(path="/checkpoints/model", format=ExportFormat.HUGGING_FACE),
    ),
    "plan": Plan(
        job="translator",
        epoch=7,
        launch=2,
        directive=Directive.SHRINK,
        ranks=(
            Rank(rank=0, pod="translator-2-0", address="127.17.0.4", gpu_type="v100", node="n1"),
            Rank(
                rank=1, pod="translator-2-0", local_rank=1, address="127.17.0.4", gpu_type="v100", node="n1"
            ),
            Rank(rank=2, pod="translator-2-2", address="127.17.0.6", gpu_type="v100", node="n1"),
            Rank(
                rank=3, pod="translator-2-2", local_rank=1, address="127.17.0.6", gpu_type="v100", node="n1"
            ),
        ),
        stages=STAGES,
        reason="repack from 4 pods to 2",
        failures_per_hour=0.125,
        candidates=(
            Candidate(schedule="1F1B", layers=(3, 5), step_seconds=0.25, memory_bytes=65536.0),
            Candidate(schedule="ZeroBubbleV", layers=(2, 2, 2, 2), repeated=2, step_seconds=0.1875),
        ),
    ),
    "report": Report(
        epoch=6,
        step=120,
        loss=2.375,
        steps_per_second=3.5,
        layer_seconds=(0.01, 0.02),
        layer_forward_seconds=(0.0025, 0.005),
        layer_optimizer_seconds=(0.001, 0.002),
        layer_bytes=(4096, 8192),
        layer_weight_bytes=(1024, 2048),
        layer_activation_bytes=(65536, 131072),
        layer_output_bytes=(4096, 8192),
        layer_gradient_bytes=(16384, 32768),
        layer_repeated_bytes=(0, 0),
        stages=STAGES,
        imbalance=0.25,
        bubble=0.4,
        rebalances=2,
        last_rebalance_step=100,
        imbalance_before=0.75,
        imbalance_after=0.25,
        rebalance_pause_ms=12.5,
        checkpoint_step=100,
        resumed_from_step=50,
        emulated=10.0,
        validation_loss=2.5,
        validation_step=100,
        not_saved="step 120 is not saved",
        bad_samples=2,
        flops_per_second=2.5e12,
        part_of_peak=0.375,
        goodput=0.875,
        slow_ranks=(SlowRank(rank=1, factor=1.5),),
        tried=(Tried(step_seconds=0.25), Tried(reason="layer 2 stays where it is")),
        kept=0,
        checkpoint_every_steps=200,
        checkpoint_seconds=1.5,
        checkpoint_write_seconds=20.5,
    ),
    "proposal": Proposal(
        epoch=6,
        step=121,
        kept_pods=("translator-2-0", "translator-2-2"),
        released_pods=("translator-2-1", "translator-2-3"),
        stages=STAGES,
        step_seconds_before=0.5,
        step_seconds_after=0.525,
        reason="2 ranks carry what is left of the layers",
    ),
    "ack": Ack(epoch=7, step=125, pause_ms=48.0, checkpoint_step=None),
    "termination_message": TerminationMessage(
        reason=ExitReason.PEER_LOST, message="rank 3 closed its connection", step=124
    ),
}


def at_default(config: Settings, path: str = "") -> Iterator[str]:
    """Fields that have the value that they have where nothing is stated, at any depth."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Settings):
            yield from at_default(value, f"{path}{name}.")
        elif value == field.get_default(call_default_factory=True):
            yield f"{path}{name}"
