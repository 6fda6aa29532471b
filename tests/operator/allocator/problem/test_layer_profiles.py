"""Layers that trainers have measured: by kind, within a namespace, and whatever the report says."""

import dataclasses

import pytest
from ballast_operator.allocator.decider import record
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract.messages import Ack, Report
from ballast_policies.scheduling.measurements import MOST_LAYERS, Measurements

from tests.operator.views.builders import a_config, a_plan, a_spec, a_view

GB = 10**9


def a_report(job="job", *, held, kept=(), namespace="team", spec=None, step=5, epoch=1):
    """The view of a job whose layers take ``held`` bytes, and ``kept`` for a microbatch."""
    view = a_view(pods=("p",), plan=a_plan(("p",)), spec=spec or a_spec(), key=(namespace, job))
    report = Report(
        epoch=epoch,
        step=step,
        loss=1.0,
        steps_per_second=1.0,
        layer_bytes=tuple(held),
        layer_activation_bytes=tuple(kept),
    )
    return dataclasses.replace(view, lease=LeaseView(report=report, ack=Ack(epoch=1, step=0)))


def need(measurements, job="other", *, namespace="team", spec=None):
    return measurements.profiles.need((namespace, job), spec or a_spec())


def test_another_job_of_the_kind_is_known_to_need_as_much():
    """The same model, batches and parallelism in the same namespace."""
    measurements = Measurements()
    record(a_report(held=[2 * GB] * 8, kept=[GB] * 8), measurements)
    assert need(measurements).least(1) == pytest.approx(24 * GB, rel=2e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "rivals"},
        {"spec": a_spec(config=a_config(model={"name": "gpt", "layers": 8, "args": {"width": 512}}))},
        {"spec": a_spec(config=a_config(training={"recompute": True}))},
        {"spec": a_spec(config=a_config(parallelism={"tensor": 2}, repack={"enabled": False}))},
    ],
    ids=["namespace", "model", "recompute", "tensor degree"],
)
def test_another_kind_or_namespace_learns_nothing(other):
    """Their layers take other amounts, and no namespace keeps another off GPUs by what it reports."""
    measurements = Measurements()
    record(a_report(held=[2 * GB] * 8), measurements)
    assert need(measurements, **other) is None


def test_what_every_layer_repeats_is_one_kind_whether_it_is_stated_or_not():
    """The API server states defaults in jobs whose layers were measured before there was the field."""
    stated, some = (
        a_spec(config=a_config(training={"recompute": True, "recomputeEvery": every})) for every in (1, 2)
    )
    measurements = Measurements()
    record(a_report(held=[GB] * 8, spec=a_spec(config=a_config(training={"recompute": True}))), measurements)
    assert need(measurements, spec=stated) is not None
    assert need(measurements, spec=some) is None


def test_of_a_job_the_largest_bytes_count_and_of_two_jobs_the_newer_one():
    """A pruned model's next launch may start from the whole one; a wrong report ends with the next job."""
    measurements = Measurements()
    record(a_report("one", held=[4 * GB] * 8), measurements)
    record(a_report("one", held=[GB] * 8, step=50), measurements)
    assert need(measurements).least(1) == pytest.approx(32 * GB, rel=2e-3)
    record(a_report("two", held=[GB] * 8), measurements)
    assert need(measurements).least(1) == pytest.approx(8 * GB, rel=2e-3)


@pytest.mark.parametrize(
    "report",
    [
        {"held": []},
        {"held": [GB] * 5},
        {"held": [GB] * (MOST_LAYERS + 1)},
        {"held": [GB] * 8, "epoch": 7},
    ],
    ids=["no bytes", "not the model's layers", "too many", "of another plan"],
)
def test_reports_that_cannot_be_used_leave_what_is_known(report):
    """Nothing is learnt from them, and nothing fails."""
    measurements = Measurements()
    record(a_report("one", held=[2 * GB] * 8), measurements)
    record(a_report("two", **report), measurements)
    assert need(measurements).least(1) == pytest.approx(16 * GB, rel=2e-3)


def test_activations_of_another_number_of_layers_are_left_out():
    """The bytes held still count."""
    measurements = Measurements()
    record(a_report(held=[GB] * 8, kept=[GB] * 3), measurements)
    assert need(measurements).least(1) == pytest.approx(8 * GB, rel=2e-3)


def test_a_report_that_says_the_same_again_computes_nothing_again():
    """Every job's report is looked at in every round."""
    measurements = Measurements()
    record(a_report(held=[GB] * 8), measurements)
    first = need(measurements)
    record(a_report(held=[GB + 1000] * 8, step=9), measurements)
    assert need(measurements) is first
