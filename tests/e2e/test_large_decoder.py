"""A decoder of 100 million parameters, from ``from_pretrained`` through all that moves it, and back."""

import os
from pathlib import Path

import pytest
import torch
from ballast_localcluster.nodes.containers.warm_start import WARM_START_VARIABLE
from ballast_localcluster.nodes.node import ProcessNode
from ballast_trainer.reporting.callback import StopTraining

from tests.e2e.endless_jobs import ENDLESS
from tests.support.waiting import eventually
from tests.trainer.models import families

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

SIZES = families.SIZES | {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""32.8 million in embedding and head, 4.2 in each of 16 layers. All processes together take 10 GB at most."""
SAMPLES, BATCHES = 4, 2
DATA = {"name": "tests.trainer.models.families:batches", "args": {"kind": "next"}}
POOL = {
    "name": "plain",
    "nodeSelector": {"ballast.dev/pool": "plain"},
    "gpuType": "plain",
    "pricePerGpuHour": 1,
}
POLICIES = {"group": "ballast.dev", "version": "v1alpha1", "plural": "clusterpolicies", "name": "demo"}


def stop(event, step, values, file):
    """The job's callback: it ends once the file is there."""
    if Path(file).exists():
        raise StopTraining("the test is over")


@pytest.fixture
def nodes(ballast, monkeypatch):
    """Four of a GPU each, in a pool of their own; the last one is about to go."""
    # Their trainers import this module.
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    names = [f"plain-{number}" for number in range(4)]
    ballast.cluster.add_nodes(ProcessNode(name=name, gpus=1, pool="plain") for name in names)
    ballast.announce_end(names[-1])
    pools = ballast.custom.get_cluster_custom_object(**POLICIES)["spec"]["nodePools"]
    for changed in ([*pools, POOL], pools):
        ballast.custom.patch_cluster_custom_object(**POLICIES, body={"spec": {"nodePools": changed}})
        if changed is not pools:
            yield names


def job(ballast, folder):
    """A pod on each node that it may have.

    Its layers move by their weights, and it grows by stated speeds, as it has never had four ranks when it
    does: no machine's speed decides either.
    """
    speeds = {2: 0.001, 3: 0.01, 4: 1.0}
    made = ballast.demo_job(
        "transformer",
        "large",
        totalSteps=ENDLESS,
        grow=True,
        gpuTypes=["plain"],
        model={
            "name": "ballast_trainer.models.hugging_face:pretrained",
            "layers": SIZES["num_hidden_layers"] + 2,
            "args": {"checkpoint": str(folder / "base")},
        },
        data=DATA,
        parallelism={"gpusPerPod": 1},
        pipeline={"minStages": 2, "maxStages": 4, "microbatches": 4, "globalBatchSize": SAMPLES},
        dynamics=[],
        rebalance={"everySteps": 2, "minGain": 0.02, "by": "parameters"},
        repack={"enabled": False},
        checkpoint={"path": "/checkpoints", "everySteps": ENDLESS, "keep": 1, "inMemoryEverySteps": 1},
        evaluation={"everySteps": ENDLESS, "batches": BATCHES, "data": DATA},
        callback={"name": f"{__name__}:stop", "args": {"file": str(folder / "stop")}},
        export={"path": str(folder / "trained"), "format": "huggingFace"},
        # A number beside each weight and gradient, not two: they are copied to other ranks, and again.
        training={"optimizer": "torch.optim:RMSprop", "learningRate": 0.0003, "warmupSteps": 0},
        throughput=[
            {"gpuType": "plain", "stages": stages, "stepsPerSecond": rate} for stages, rate in speeds.items()
        ],
    )
    (container,) = made["spec"]["template"]["spec"]["containers"]
    # What a copy held goes back to the system at once: the C library would keep gigabytes of it by thread.
    variables = {WARM_START_VARIABLE: "", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    of_job = [{"name": name, "value": value} for name, value in variables.items()]
    container["env"] = [*container.get("env", []), *of_job]
    return made


def loss_of(folder):
    """On the job's validation data, by transformers alone."""
    import transformers

    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    with torch.no_grad():
        for number in range(BATCHES):
            tokens, _ = families.batches()(0, number, SAMPLES)
            losses.append(float(whole(tokens, labels=tokens).loss))
    return sum(losses) / len(losses)


def stages(report):
    return [(of["firstLayer"], of["endLayer"]) for of in report.get("stages", [])]


def test_a_large_decoder_is_tuned_moved_robbed_of_a_pod_grown_and_exported(ballast, nodes, tmp_path):
    """Layers move by their weights, the others go on in place of a lost pod, and more come than there were.

    One launch does it all; transformers reads the folder that it leaves and has the job's own loss, to 1e-4
    of it: both compute in fp32, whose sums in another order differ by less, and a step is worth far more.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert sum(parameter.numel() for parameter in whole.parameters()) >= 99e6
    whole.save_pretrained(tmp_path / "base")
    del whole
    with ballast.operator():
        ballast.apply(job(ballast, tmp_path))
        ballast.wait_for_report("large", step=1)
        first = [(of.first_layer, of.end_layer) for of in ballast.plan("large").stages]
        eventually(lambda: stages(ballast.report("large")) not in ([], first), "layers to move")
        eventually(lambda: ballast.status("large").get("rebalances"), "its status to tell of it")
        ballast.wait_for_report("large", step=4)
        kept, other, lost = ballast.plan("large").pods
        ballast.core.delete_namespaced_pod(lost, ballast.namespace, grace_period_seconds=0)
        eventually(lambda: ballast.status("large").get("repacks"), "the others to go on without it")
        (shrunk,) = ballast.status("large")["repacks"]
        assert (shrunk["gpus"], shrunk["releasedPods"]) == (2, [lost])
        ballast.stay(nodes[-1])

        def grown():
            allocation = ballast.status("large")["allocation"]
            return allocation["gpus"] == 4 and not allocation.get("joining")

        eventually(grown, "pods to come and join", lambda: ballast.status("large"))
        assert ballast.plan("large").pods[:2] == (kept, other)
        ballast.wait_for_report("large", step=ballast.report("large")["step"] + 2)
        (tmp_path / "stop").touch()
        ballast.wait_for_state("large", "Succeeded")
        status = ballast.status("large")
        assert (status["launches"], status.get("restarts", {})) == (1, {})
        told = eventually(lambda: ballast.report("large").get("validationLoss"), "its last evaluation")
        ballast.end_job("large")
    assert told == pytest.approx(loss_of(tmp_path / "trained"), rel=1e-4)
    assert told < loss_of(tmp_path / "base") - 0.5
