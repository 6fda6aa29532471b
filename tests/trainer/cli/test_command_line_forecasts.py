"""``simulate``: what a configuration will do, from a profile, without ranks."""

import json

import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.profile import ProfiledLayer
from ballast_policies.planning.schedules.registry import trained_schedules
from ballast_trainer.cli.main import main
from ballast_trainer.forecast import forecasts
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.jobs import small_job
from tests.trainer.cli.profiled_layer import LAYER


def simulated(call, *arguments, **fields):
    result = call("simulate", "--output", "json", *arguments, **fields)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["forecasts"]


def test_an_even_1f1b_step_equals_the_formula(call):
    """(m + p - 1) t, idle (p - 1) / (m + p - 1), and p - r microbatches in flight on rank r."""
    (only,) = simulated(call)
    assert only["partition"] == "start"
    assert only["stepSeconds"] == pytest.approx((8 + 3) * 3 * 0.03)
    assert only["formulaSeconds"] == pytest.approx(only["stepSeconds"])
    assert only["bubble"]["idle"] == pytest.approx(3 / 11)
    assert only["bubble"]["dynamic"] == pytest.approx(0)
    assert [rank["inFlight"] for rank in only["ranks"]] == [4, 3, 2, 1]
    # Outputs of 5 bytes in flight, and room for two messages.
    assert [rank["bytes"] for rank in only["ranks"]] == [
        3 * (400 + k * 10) + (k + 2) * 5 for k in (4, 3, 2, 1)
    ]


@pytest.mark.parametrize(
    ("pipeline", "parallelism", "layers"),
    [
        ({"maxStages": 3}, {"data": 2}, [4] * 6),
        ({}, {"tensor": 2, "data": 2}, [3] * 16),
        ({"schedule": "GPipe", "replicas": [1, 2]}, {}, [4, 8, 8]),
    ],
)
def test_a_job_is_forecast_on_all_ranks_of_its_stages(call, pipeline, parallelism, layers):
    """As many as a TrainingJob has: ``maxStages`` counts positions, of which each has several ranks."""
    pipeline = {"microbatches": 8, "globalBatchSize": 16, **pipeline}
    tensor = parallelism.get("tensor", 1)
    found = simulated(call, pipeline=pipeline, parallelism=parallelism, measured_at=tensor)[0]
    # One pipeline's ranks stand for those beside them.
    column = tensor * parallelism.get("data", 1)
    held = [sum(end - first for first, end in rank["layers"]) for rank in found["ranks"]]
    assert held * column == layers


def test_a_step_of_heterogeneous_ranks_is_as_long_as_its_slowest_pipeline(call):
    """Two replicas of two stages, ranks by position: the second replica has half the speed."""
    seconds = {"parallelism": {"data": 2}}
    (alike,) = simulated(call, "--ranks", "4", **seconds)
    (slow, *_) = simulated(call, "--ranks", "4", "--speeds", "1,0.5,1,0.5", **seconds)
    assert slow["stepSeconds"] == pytest.approx(2 * alike["stepSeconds"])
    (slow_end, balanced) = simulated(call, "--ranks", "2", "--speeds", "1,0.5")
    assert slow_end["stepSeconds"] == pytest.approx(8 * 6 * 0.06 + 6 * 0.03)
    assert [rank["layers"] for rank in balanced["ranks"]] == [[[0, 8]], [[8, 12]]]


@pytest.mark.parametrize("every", [0, 1, 2])
def test_ranks_that_share_layers_all_reduce_in_each_action(call, every):
    """(t - 1) / t of what goes both ways, forward and backward; 1 / t of an output between stages.

    A backward that repeats its forward has that one's, too: of all layers, or of every second one.
    """
    training = {"recompute": True, "recomputeEvery": every} if every else {}
    shared = {"parallelism": {"tensor": 2}, "measured_at": 2, "training": training}
    layer = {**LAYER, "reducedBytes": 30}
    alone = simulated(call, "--ranks", "2", training=shared["training"])
    assert simulated(call, "--ranks", "4", **shared) == alone
    (slow,) = simulated(call, "--ranks", "4", "--bandwidth", "500", layers=(layer,) * 12, **shared)
    passes = {"forwardSeconds": 1, "backwardSeconds": 1 + (1 / every if every else 0)}
    longer = {name: LAYER[name] + count * 15 / 500 for name, count in passes.items()}
    (expected,) = simulated(call, "--ranks", "2", "--bandwidth", "1000", layers=({**LAYER, **longer},) * 12)
    assert slow["stepSeconds"] == pytest.approx(expected["stepSeconds"])


@pytest.mark.parametrize(("overhead", "longer"), [(0.0, 2.0), (0.03, 1.0), (0.015, 1.5)])
def test_a_profile_of_smaller_microbatches_is_scaled_to_the_jobs(call, tmp_path, overhead, longer):
    """As a planner does it: twice the samples take twice as long, but for what any microbatch takes."""
    layers = [{**LAYER, "overheadSeconds": overhead}] * 12
    stated = tmp_path / "stated.json"
    stated.write_text(json.dumps({"microbatchSize": 2, "layers": layers}))
    of_four = {"pipeline": {"microbatches": 4, "globalBatchSize": 16}}
    (found,) = simulated(call, "--profile", str(stated), **of_four)
    assert found["stepSeconds"] == pytest.approx((4 + 3) * 3 * 0.03 * longer)
    (of_two,) = simulated(call, "--profile", str(stated))
    assert of_two["stepSeconds"] == pytest.approx((8 + 3) * 3 * 0.03)
    kept = [one["ranks"][3]["activationBytes"] for one in (found, of_two)]
    assert kept[0] == 2 * kept[1]


@pytest.mark.parametrize("data", [1, 2])
def test_a_report_of_replicas_has_the_seconds_of_one(call, tmp_path, data):
    """Of its part of the step's microbatches, as ranks measure and report it."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"layerSeconds": [8 / data * 0.03] * 12}))
    found = simulated(call, "--profile", str(report), parallelism={"data": data})[0]
    assert found["stepSeconds"] == pytest.approx((8 / data + 3) * 3 * 0.03)


def test_actions_take_longer_than_their_layers_where_that_is_said(call):
    """By the same seconds on each rank, whatever its speed: 8 + 3 forwards and backwards in a row."""
    (bare,) = simulated(call)
    (real,) = simulated(call, "--action-seconds", "0.001")
    assert real["stepSeconds"] == pytest.approx(bare["stepSeconds"] + (8 + 3) * 2 * 0.001)


def test_gradients_are_summed_over_the_replicas_of_a_stage(call):
    """2 (n - 1) / n of a stage's weights over the bandwidth, once a step."""
    (alone,) = simulated(call, "--ranks", "4", "--bandwidth", "1e6")
    pipeline = {"microbatches": 16, "globalBatchSize": 16}
    (both,) = simulated(
        call, "--ranks", "8", "--bandwidth", "1e6", pipeline=pipeline, parallelism={"data": 2}
    )
    assert both["stepSeconds"] == pytest.approx(alone["stepSeconds"] + 3 * 100 / 1e6)


@pytest.mark.parametrize(("ranks", "microbatches", "gathered"), [(8, 16, (8 + 3) * 4), (24, 24, 0)])
def test_shared_weights_are_gathered_in_every_forward_and_backward(call, ranks, microbatches, gathered):
    """ZeRO-3: half of two of a stage's three layers, over the bandwidth; its only layer stays whole."""
    pipeline = {"microbatches": microbatches, "globalBatchSize": microbatches}
    own, shared = (
        simulated(
            *(call, "--ranks", str(ranks), "--bandwidth", "1e6"),
            pipeline=pipeline,
            parallelism={"data": 2, "zeroStage": stage},
        )[0]["stepSeconds"]
        for stage in (2, 3)
    )
    assert shared == pytest.approx(own + gathered * 50 / 1e6)


def test_backwards_hold_gradients_and_repeated_activations_for_a_moment(call):
    """Of one layer at a time; of all layers between the halves of a split backward."""

    def most(schedule, **sizes):
        (only,) = simulated(call, layers=({**LAYER, **sizes},) * 12, schedule=schedule)
        return only["ranks"][1]["activationBytes"]

    assert most("1F1B", gradientBytes=7, repeatedBytes=20) == most("1F1B") + 7 + 20
    assert most("GPipe", gradientBytes=7) == most("GPipe") + 7
    assert most("ZeroBubbleH1", gradientBytes=7) >= most("ZeroBubbleH1") + 3 * 7


def test_a_split_backward_repeats_its_forward_once(call):
    """In the inputs' half, which another stage waits for; a profile has the repeat in the whole backward."""
    layer = {**LAYER, "backwardSeconds": 0.03}
    (alone,) = simulated(call, layers=(layer,) * 12, schedule="ZeroBubbleH1")
    (repeats,) = simulated(call, layers=(layer,) * 12, schedule="ZeroBubbleH1", training={"recompute": True})
    busy = [[rank["busySeconds"] for rank in one["ranks"]] for one in (alone, repeats)]
    assert busy[0] == pytest.approx(busy[1])
    assert repeats["stepSeconds"] > alone["stepSeconds"]


def test_gradients_are_counted_from_the_first_backward_of_their_stage(call):
    """All forwards first: the fullest moment is after the first backward, not before it."""
    big = {**LAYER, "weightBytes": 10_000, "heldBytes": 40_000}
    (alone,) = simulated(call, layers=(big,) * 12, schedule="GPipe")
    assert alone["ranks"][1]["bytes"] == 3 * 40_000 + 7 * 35 + 2 * 5


def test_replicas_of_the_pipeline_hold_a_layers_gradients_twice_while_they_average_them(call):
    """With the last backward, layer by layer."""
    big = {**LAYER, "weightBytes": 10_000, "heldBytes": 40_000}
    (alone,) = simulated(call, "--ranks", "4", layers=(big,) * 12)
    (both,) = simulated(call, "--ranks", "8", layers=(big,) * 12, parallelism={"data": 2})
    assert alone["ranks"][1]["bytes"] < 3 * 40_000 + 1000
    assert both["ranks"][1]["bytes"] == pytest.approx(3 * 40_000 + 10_000, abs=1000)


def test_checkpoints_beside_the_steps_cost_memory_of_the_host(call):
    """For weights and the optimizer's state; of replicas each writes a share; others take none. Layers that
    do not learn have weights alone.
    """
    big, saved = {**LAYER, "weightBytes": 10_000, "heldBytes": 40_000}, {"path": "/checkpoints"}

    def host(*options, layer=big, **fields):
        (only,) = simulated(call, *options, layers=(layer,) * 12, **fields)
        return {rank["hostBytes"] for rank in only["ranks"]}

    assert host() == host(checkpoint={**saved, "asyncMode": "disabled"}) == {0}
    assert host(checkpoint=saved) == {3 * 30_000}
    assert host(checkpoint=saved, layer={**big, "weightBytes": 40_000}) == {3 * 40_000}
    assert host("--ranks", "8", checkpoint=saved, parallelism={"data": 2}) == {3 * 15_000}


def test_weight_versions_cost_memory_where_there_is_no_flush(call):
    """PipeDream stashes p - r versions, 2BW two; an undisturbed pipeline does a step in m t."""
    for schedule, versions in (("PipeDream", [4, 3, 2, 1]), ("PipeDream2BW", [2, 2, 2, 2])):
        (only,) = simulated(call, schedule=schedule, training={"clipNorm": None})
        assert [rank["weightVersions"] for rank in only["ranks"]] == versions
        assert [rank["heldBytes"] for rank in only["ranks"]] == [3 * (400 + (v - 1) * 100) for v in versions]
        assert only["stepSeconds"] == pytest.approx(8 * 3 * 0.03)


def test_a_lopsided_model_is_forecast_as_it_starts_and_as_it_is_rebalanced(call):
    """Layers that cost ten times as much in front: the balanced partition moves them apart."""
    heavy = {**LAYER, "forwardSeconds": 0.1, "backwardSeconds": 0.2}
    start, balanced = simulated(call, layers=(heavy, heavy, heavy, *[LAYER] * 9))
    assert (start["partition"], balanced["partition"]) == ("start", "balanced")
    assert [rank["layers"] for rank in balanced["ranks"]] == [[[0, 1]], [[1, 2]], [[2, 3]], [[3, 12]]]
    assert balanced["stepSeconds"] < 0.5 * start["stepSeconds"]
    assert balanced["imbalance"] < 0.1 < start["imbalance"]
    assert start["bubble"]["dynamic"] > 0.3


def test_transfers_and_the_optimizer_take_their_time(call):
    """Bytes over the bandwidth at each boundary, and the update after the last backward."""
    (free,) = simulated(call)
    (slow,) = simulated(call, "--bandwidth", "500")
    assert slow["stepSeconds"] >= free["stepSeconds"] + 2 * 3 * 5 / 500 - 1e-12
    (learns,) = simulated(call, layers=({**LAYER, "optimizerSeconds": 0.05},) * 12)
    assert learns["stepSeconds"] == pytest.approx(free["stepSeconds"] + 3 * 0.05)


@pytest.mark.slow
@examples(30)
@given(
    schedule=st.sampled_from(trained_schedules(asynchronous=False)),
    seconds=st.lists(st.floats(0.001, 1.0), min_size=8, max_size=16),
)
def test_the_forecast_never_beats_its_busiest_rank(schedule, seconds):
    """A step takes at least the busiest rank's work; the balanced partition's busiest rank has no more."""
    config = JobConfig.from_mapping(
        {
            "totalSteps": 9,
            "model": {"name": "gpt"},
            "pipeline": {"microbatches": 8, "globalBatchSize": 8, "schedule": schedule},
        }
    )
    rows = [ProfiledLayer(forward_seconds=second, backward_seconds=2 * second) for second in seconds]
    found = forecasts(config, rows, ranks=4)
    for one in found:
        busiest = max(rank.busy_seconds for rank in one.ranks)
        assert one.step_seconds >= busiest - 1e-9
        assert sum(rank.busy_seconds for rank in one.ranks) == pytest.approx(8 * 3 * sum(seconds))
        assert {layer for rank in one.ranks for cut in rank.layers for layer in range(*cut)} == set(
            range(len(rows))
        )


@pytest.mark.parametrize(
    ("command", "arguments", "fields", "words"),
    [
        ("trace", ["--out", "trace.png"], {}, "must end in one of .json, .svg"),
        ("simulate", ["--ranks", "13"], {}, "13 stages need as many layers; the profile has 12"),
        ("simulate", [], {"parallelism": {"tensor": 2}}, "measured at parallelism.tensor 1, the job has 2"),
        (
            "simulate",
            ["--ranks", "3"],
            {"parallelism": {"tensor": 2}, "measured_at": 2},
            "multiple of tensor 2",
        ),
        ("simulate", ["--ranks", "3"], {"parallelism": {"data": 2}}, "3 ranks are no multiple of"),
        ("simulate", [], {"layers": ({"forwardSeconds": 1},)}, "not a profile"),
        ("simulate", [], {"layers": ()}, "give either layers, or layerSeconds"),
        ("simulate", [], {"layers": ({"forwardSeconds": 1, "backwardSeconds": -1},)}, "below 0"),
        ("simulate", ["--bandwidth", "0"], {}, "--bandwidth"),
        ("simulate", ["--bandwidth", "nan"], {}, "'--bandwidth': nan is not a finite number"),
        ("trace", ["--action-seconds", "inf"], {}, "'--action-seconds': inf is not a finite number"),
        ("simulate", ["--speeds", "1,2"], {}, "2 speeds for 4 ranks"),
        ("simulate", ["--speeds", "1,nan,1,1"], {}, "not a list of numbers above 0"),
        ("simulate", ["--loads", "run.jsonl", "--speeds", "1,1,1,0.5"], {}, "--speeds: --loads has"),
        ("simulate", ["--at-step", "9"], {}, "--at-step: --profile was measured before"),
        ("trace", ["--even", "--bandwidth", "1e9"], {}, "--bandwidth: --even measures nothing"),
        ("trace", ["--out", "no/such/folder/trace.svg"], {}, "no folder no/such/folder"),
        ("simulate", ["--set", "pipeline.schedule=2F"], {}, "pipeline.schedule"),
        ("trace", ["--set", "pipeline.stagesPerRank=2"], {}, "another number of stages per rank"),
    ],
)
def test_a_configuration_that_cannot_be_forecast_is_refused_with_the_reason(
    call, command, arguments, fields, words
):
    """Exit code 2, the field, the reason and what to change."""
    result = call(command, *arguments, **fields)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.slow
def test_without_a_profile_the_layers_are_measured_first(tmp_path):
    """Seconds and bytes of a small model; with recomputation one layer at a time has its activations."""
    config = small_job({"name": "gpt", "layers": 5, "args": {"dim": 16, "heads": 2, "context": 8}})
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    kept = {}
    for recompute in ("false", "true"):
        arguments = ["--config", str(tmp_path / "config.yaml"), "--ranks", "2", "--output", "json"]
        result = CliRunner().invoke(
            main, ["simulate", *arguments, "--set", f"training.recompute={recompute}"]
        )
        assert result.exit_code == 0, result.output
        (first, *_) = json.loads(result.stdout)["forecasts"]
        assert first["stepSeconds"] > 0
        kept[recompute] = [rank["activationBytes"] for rank in first["ranks"]]
    assert kept["true"][0] < kept["false"][0]
    assert kept["true"][1] < kept["false"][1]
