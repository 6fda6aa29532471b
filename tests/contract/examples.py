"""One full example of each message; the golden files hold their bytes."""

from ballast_policies.contract import (
    Ack,
    Directive,
    ExitReason,
    Plan,
    Proposal,
    Rank,
    Report,
    Stage,
    TerminationMessage,
)

STAGES = (
    Stage(rank=0, first_layer=0, end_layer=3),
    Stage(rank=1, first_layer=3, end_layer=8),
)

EXAMPLES = {
    "plan": Plan(
        job="translator",
        epoch=7,
        launch=2,
        directive=Directive.SHRINK,
        ranks=(
            Rank(rank=0, pod="translator-2-0", address="127.17.0.4", gpu_type="v100"),
            Rank(rank=1, pod="translator-2-2", address="127.17.0.6", gpu_type="v100"),
        ),
        stages=STAGES,
        reason="repack from 4 to 2 ranks",
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
        layer_activation_bytes=(65536, 131072),
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
