"""The load of a dynamic model's example moves, and the balancer follows it over four ranks."""

import importlib
import json
import statistics
from pathlib import Path

import pytest
import torch
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.cli.main import main
from ballast_trainer.config import read_job_config
from ballast_trainer.dynamics.mixture_of_experts import Experts
from ballast_trainer.dynamics.registry import build_dynamics
from ballast_trainer.models.registry import build_model
from ballast_trainer.seeding import seed_build
from click.testing import CliRunner

from tests.support.examples import first_daily

CURVES = sorted((Path(__file__).parent / "load_curves").glob("*.jsonl"))
EXAMPLES = Path(__file__).parents[3] / "examples/trainer"


def test_every_kind_of_change_has_a_curve():
    """Of the example that is named like it."""
    kinds = {
        change.kind
        for curve in CURVES
        for change in read_job_config(read_config(EXAMPLES / f"{curve.stem}.yaml", ())).dynamics
    }
    assert kinds == set(DYNAMICS)


@pytest.mark.parametrize("curve", CURVES, ids=[path.stem for path in CURVES])
def test_layers_move_three_times_as_the_recorded_load_changes(curve, tmp_path):
    """From the even split that a run begins with, by the example's own settings.

    ``benchmarks/trainer/pause.py --record`` has measured the seconds of the layers in a run of the example,
    and what its decisions read of them; replaying them depends on nothing that a machine does.
    """
    first = json.loads(curve.read_text().splitlines()[0])
    alike = {"event": "loads", "step": 0, "seconds": [0.01] * len(first["seconds"])}
    path = tmp_path / "loads.jsonl"
    path.write_text(json.dumps(alike) + "\n" + curve.read_text())
    config = EXAMPLES / f"{curve.stem}.yaml"
    options = ["--config", str(config), "--ranks", "4", "--loads", str(path), "--output", "json"]
    result = CliRunner().invoke(main, ["simulate", *options])
    assert result.exit_code == 0, result.output
    replay = json.loads(result.stdout)["replay"]
    assert len(replay["moves"]) >= 3
    assert replay["bestSeconds"] <= replay["followedSeconds"] < replay["firstSeconds"]
    if curve.stem != "sparse-attention":
        # There the cut that is best in hindsight is nearly as good as the best of each look.
        assert replay["followedSeconds"] < replay["staticSeconds"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(5)))
def test_what_the_routers_read_sets_the_load_of_the_experts_example(monkeypatch, seed):
    """Of the same weights: prose and programs are spread over the experts, a map fills one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    job = read_job_config(read_config(EXAMPLES / "mixture-of-experts.yaml", ()))
    model, (change,) = build_model(job.model), build_dynamics(job.dynamics, job.model.layers)
    layers = []
    for index in range(model.layer_count):
        seed_build(seed=seed, layer=index)
        layers.append(change.prepare(index, model.build_layer(index)))
    routed = [index for index, layer in enumerate(layers) if isinstance(getattr(layer, "mlp", None), Experts)]
    assert routed == [17, 18, 19]
    batch = importlib.import_module("topics").in_order(**job.data.args)
    topics, fullest = job.data.args["topics"], {}
    for number, topic in enumerate(topics):
        hidden, _ = batch(seed, number * job.data.args["steps"], job.pipeline.global_batch_size)
        with torch.no_grad():
            for layer in layers[:-1]:
                hidden = layer(hidden)
        loads = [layers[index].mlp.loads for index in routed]
        fullest[topic] = statistics.mean(max(of) / sum(of) for of in loads)
        assert all(len(of) == 16 for of in loads)
    assert 2 * max(fullest["prose"], fullest["programs"]) < fullest["map"]
