"""A plan that fits, by any planner, is admitted, launched and forecast with the same bytes."""

import pytest
from ballast_operator.views.spec import spec_of_launch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.launch import partition_of
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import devices_of
from ballast_policies.planning.planners.registry import PLANNERS, PlanRequest
from ballast_policies.planning.profile import GpuKind, LayerProfile, ProfiledLayer
from ballast_policies.planning.schedules.registry import trained_schedules
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_trainer.forecast import forecast
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples

BYTES = ("held_bytes", "weight_bytes", "activation_bytes", "output_bytes", "gradient_bytes")


@st.composite
def requests(draw, schedules, *, shards):
    """Layers of different bytes, a fourth of them weights, on equal GPUs of one server.

    ``shards``: replicas may share them.
    """
    count, gpus, microbatches = draw(st.integers(2, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    limit, schedule = draw(st.integers(20, 400)), draw(st.sampled_from(schedules))

    def column(top, least=0):
        return tuple(draw(st.lists(st.integers(least, top), min_size=count, max_size=count)))

    weights = column(20)
    profile = LayerProfile(
        forward_seconds=tuple(draw(st.lists(st.floats(0.1, 2), min_size=count, max_size=count))),
        backward_seconds=tuple(draw(st.lists(st.floats(0.1, 2), min_size=count, max_size=count))),
        held_bytes=tuple(4 * weight for weight in weights),
        weight_bytes=weights,
        activation_bytes=column(30),
        output_bytes=column(20),
        gradient_bytes=column(9),
        repeated_bytes=(0,) * count,
    )
    kinds = (GpuKind(gpu_type="a", count=gpus, memory_bytes=limit),)
    devices = devices_of(kinds, inside=50.0, between=50.0)
    return PlanRequest(
        profile=profile,
        gpus=kinds,
        microbatches=microbatches,
        samples=microbatches,
        schedule=schedule,
        chunks=2,
        top=3,
        model=CostModel(
            profile, (0.0,) * count, 1, devices, zero_stage=draw(st.integers(0, 3)) if shards else 0
        ),
    )


def spec_of(plan, layers):
    fields = {"totalSteps": 10, "model": {"name": "gpt", "layers": layers}, **plan["job"]}
    return spec_of_launch(JobConfig.from_mapping(fields).to_json(), team="")


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["pipeline", "best", "pipedream", "2bw", "megatron", "amp"])
@examples(25)
@given(data=st.data())
def test_what_a_planner_says_fits_is_admitted_launched_and_forecast_so(planner, data):
    """Microbatches of the profile's size without recomputation: measured as they are planned."""
    schedules = trained_schedules() if planner == "pipeline" else ("1F1B",)
    request = data.draw(requests(schedules, shards=PLANNERS[planner].shards))
    profile, limit = request.profile, request.gpus[0].memory_bytes
    try:
        answer = PLANNERS[planner].plan(request).content
    except (PlanningError, ScheduleError):
        return
    plans = answer["plans"] or [{**answer, "fits": True, "recompute": False, "microbatchSize": 1, "gpus": 0}]
    measured = MeasuredLayers(
        held_bytes=profile.held_bytes,
        weight_bytes=profile.weight_bytes,
        activation_bytes=profile.activation_bytes,
        output_bytes=profile.output_bytes,
        gradient_bytes=profile.gradient_bytes,
    )
    rows = [
        ProfiledLayer(
            forward_seconds=1.0,
            backward_seconds=1.0,
            **{name: getattr(profile, name)[i] for name in BYTES},
        )
        for i in range(profile.layers)
    ]
    for plan in plans:
        if plan["refused"] or not plan["fits"] or plan["recompute"] or plan["microbatchSize"] != 1:
            continue
        spec = spec_of(plan, profile.layers)
        of = spec.config.parallelism
        assert of.zero_stage == (request.model.zero_stage if of.data > 1 else 0)
        gpus = spec.largest_gang
        cut = Partition(bounds=(0, *(stage["endLayer"] for stage in plan["stages"])))
        shared = [
            row.shared_by(of.optimizer_shares, gradients=of.gradient_shares, weights=of.weight_shares)
            for row in rows
        ]
        ranks = forecast(spec.config, shared, cut, ranks=gpus).ranks
        for stage in plan["stages"]:
            held = [rank.bytes for rank in ranks if (stage["firstLayer"], stage["endLayer"]) in rank.layers]
            assert stage["bytes"] == pytest.approx(max(held), rel=1e-9, abs=1e-6)
        assert max(rank.bytes for rank in ranks) <= limit * (1 + 1e-9)
        if of.zero_stage:
            # A running job's report has the bytes of a replica's part.
            continue
        assert MemoryNeed(measured, spec.pipeline_form()).fits(spec.positions(gpus), limit)
        launched = partition_of(spec.first_stages(gpus, measured, float(limit)))
        ranks = forecast(spec.config, rows, launched, ranks=gpus).ranks
        assert max(rank.bytes for rank in ranks) <= limit * (1 + 1e-9)
