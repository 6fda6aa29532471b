"""Metrics of the user's own, measured with the validation loss."""

import json

import pytest
import torch
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.reporting.prometheus import PrometheusWriter
from ballast_trainer.seeding import host_seeded

from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.ports import free_port
from tests.trainer.models import tied_models

MODULE = "tests.trainer.models.tied_models"


def job(steps=2, metrics=None, **fields):
    model, evaluation = {"name": f"{MODULE}:measured", "args": metrics or {}}, {"everySteps": 1, "batches": 3}
    return small_job(model, steps=steps, microbatches=4, batch=8, evaluation=evaluation, **fields)


def measured_in(events):
    return {event["step"]: event["metrics"] for event in events if event["event"] == "evaluation"}


def test_a_metric_is_its_mean_over_the_validation_data():
    """Of the model as it is after the step."""
    config = job(steps=1, training={"learningRate": 0.0, "weightDecay": 0.0})
    told = train_here(config)
    data = ValidatedJob.from_mapping(config).validation
    with host_seeded(0):
        whole = torch.nn.Sequential(*tied_models.modules())
    with torch.no_grad():
        batches = [data.batch(data.seed, number, 8) for number in range(3)]
        found = [float(tied_models.accuracy(whole(words), targets)) for words, targets in batches]
    assert measured_in(told.events) == {1: {"accuracy": pytest.approx(sum(found) / 3, abs=1e-6)}}


@pytest.mark.processes
def test_replicas_and_stages_measure_what_one_process_does(gang, tmp_path):
    """Every rank knows of the figure, which the last stages compute; files have it, too."""
    lines = tmp_path / "metrics.jsonl"
    config = job(parallelism={"data": 2})
    running = gang({**config, "metrics": {"jsonLines": str(lines)}}, ranks=4).succeeded()
    alone = measured_in(train_here({**config, "parallelism": {}}).events)
    assert sorted(alone) == [1, 2]
    found = measured_in(running.events("evaluation"))
    assert {step: one["accuracy"] for step, one in found.items()} == pytest.approx(
        {step: one["accuracy"] for step, one in alone.items()}, abs=1e-6
    )
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert any("validation_accuracy" in line for line in written)


def test_prometheus_has_it_by_name():
    """One gauge with a label, so that dashboards need no change."""
    writer = PrometheusWriter(free_port())
    try:
        writer.event("evaluation", 3, {"metrics": {"accuracy": 0.25, "unknown": None}})
        samples = [s for metric in writer.registry.collect() for s in metric.samples]
        found = {s.labels["name"]: s.value for s in samples if s.name == "ballast_trainer_validation_metric"}
        assert found == {"accuracy": 0.25}
    finally:
        writer.close()


def test_a_metric_that_gives_no_number_is_refused_with_its_name():
    """A logit for each word is none, nor is text."""
    with pytest.raises(TrainerError, match=r"metric 'words' of an evaluation is a tensor of .*To fix"):
        train_here(job(metrics={"words": f"{MODULE}:of_each_word"}))
    with pytest.raises(TrainerError, match="metric 'named' of an evaluation is a str"):
        train_here(job(metrics={"named": f"{MODULE}:in_words"}))


@pytest.mark.parametrize("name", ["loss", "top 5", "5"])
def test_a_name_that_no_figure_can_have_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"cannot be a metric's name\. To fix"):
        ValidatedJob.from_mapping(job(metrics={name: f"{MODULE}:accuracy"}))
