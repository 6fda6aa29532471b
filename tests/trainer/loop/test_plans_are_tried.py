"""Whatever the layers are like, a cut between any two of them trains as one process does, or is not made."""

import functools
import itertools

import pytest
from ballast_trainer.errors import ConfigurationError

from tests.support.examples import first_daily
from tests.support.held_data import Gates
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.replans import has_acked, replan, stages_at, until
from tests.trainer.layers.trained_layers import saved_layers

pytestmark = pytest.mark.processes

MODELS = "tests.trainer.models.awkward_models"


def job(model, *, schedule="1F1B", args=None, pipeline=None, **fields):
    named = {"name": f"{MODELS}:{model}", "args": args or {}}
    pipeline = {"schedule": schedule, **(pipeline or {})}
    training = {"optimizer": "sgd", "learningRate": 0.02, **fields.pop("training", {})}
    given = {"steps": fields.pop("totalSteps", 6), "microbatches": 4, "batch": 16, "training": training}
    return small_job(named, pipeline=pipeline, **given, **fields)


def whole_state(config):
    """All tensors of all layers, buffers too, of the job's last checkpoint."""
    layers = saved_layers({key: value for key, value in config.items() if key != "parallelism"})
    return {f"{layer.index}.{name}": value for layer in layers for name, value in layer.state().items()}


def alone(config):
    """The same job without replicas."""
    plain = {key: value for key, value in config.items() if key != "parallelism"}
    return plain | {"pipeline": {k: v for k, v in config["pipeline"].items() if k != "replicas"}}


def states(gang, config, tmp_path, ranks):
    """The whole state after a run on one process, and after one on ``ranks``."""
    found = []
    for name, count, options in (("one", 1, ["--single-process"]), ("many", ranks, [])):
        plain = alone(config) if count == 1 else config
        saving = {**plain, "checkpoint": {"path": str(tmp_path / name), "everySteps": 100}}
        gang(saving, ranks=count, options=options).succeeded()
        found.append(whole_state(saving))
    return found


def assert_same(one, many):
    assert one.keys() == many.keys()
    apart = {name: float((many[name] - value).abs().max()) for name, value in one.items() if value.numel()}
    assert all(gap < 2e-4 for gap in apart.values()), apart


@pytest.mark.parametrize(
    ("schedule", "ranks"), first_daily([("ZeroBubbleV", 4), ("ZeroBubbleH1", 3), ("1F1B", 4), ("GPipe", 3)])
)
def test_stages_that_end_in_views_train_as_one_process(gang, same_curve, schedule, ranks):
    """Flattened, turned, cut to shape, or nothing at all between two stages; the next may work in place."""
    config = job("ending_in_views", schedule=schedule)
    same_curve(gang(config, ranks=ranks), config)


def test_a_cut_on_which_the_job_would_end_is_tried_once_and_not_made(gang, same_curve):
    """The balancer wants it at every turn: the two stay together, the cause is named, training continues."""
    config = job("with_a_cut_that_fails", totalSteps=22, rebalance={"enabled": True, "everySteps": 10})
    running = gang(config, ranks=2)
    same_curve(running, config)
    (refused,) = running.events("cutRefused")
    assert "rank 1: LookupError: layer 0 is not in this process (in layer 1, Slow, " in refused["reason"]
    # On a busy machine another cut may seem to gain something.
    for made in running.events("rebalance"):
        assert 1 not in {stage["firstLayer"] for stage in made["stages"]}


def test_stages_that_do_not_fit_the_model_are_told_and_the_plan_is_followed(
    gang, small_config, same_curve, tmp_path
):
    """Once by plan: on the same ranks no layer moves, on fewer the trainer cuts itself."""
    config = small_config(totalSteps=8)
    gates = Gates(tmp_path / "gates", 3, 5)
    running = gang(gates.hold(config), ranks=3, options=["--channel", str(tmp_path / "channel")])
    moved, fewer = stages_at((0, 3, 6, 14), range(3)), stages_at((0, 7, 14), range(2))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    until(running, functools.partial(has_acked, tmp_path, 2))
    replan(running, tmp_path, gates, lambda plan: plan.keep(plan.pods[:2], "to go").replace(stages=fewer))
    same_curve(running, config)
    assert [event["reason"] for event in running.events("cutRefused")] == [
        f"plan.stages: plan {epoch} has 14 layers on ranks {ranks}; the model has 8, which 1F1B has on ranks "
        f"{ranks}"
        for epoch, ranks in ((2, [0, 1, 2]), (3, [0, 1]))
    ]
    for done in ("layers stay where they are", "the trainer cuts by its own measurements"):
        assert running.errors().count(f": {done}. To fix: model.layers") == 1
    (repacked,) = running.events("repack")
    assert [event["step"] for event in running.events("migrate")] == [repacked["step"]]
    assert repacked["stages"][-1]["endLayer"] == 8


@pytest.mark.parametrize(
    "change",
    first_daily(
        [
            {"parallelism": {"data": 2}, "training": {"recompute": True}},
            {"schedule": "ZeroBubbleH1"},
            {
                "dynamics": [
                    {"kind": "freezing", "startStep": 2, "endStep": 4, "everySteps": 1, "target": 0.4}
                ]
            },
            {"args": {"momentum": None}, "parallelism": {"data": 2}},
        ]
    ),
    ids=["data+recompute", "split", "freezing", "data+mean"],
)
def test_running_statistics_are_those_of_one_process(gang, tmp_path, change):
    """BatchNorm counts every microbatch once: whatever rebuilds the pipeline, recomputes or replicates it."""
    config = job("with_batch_norm", **change)
    one, many = states(gang, config, tmp_path, 2)
    (tracked,) = {int(value) for name, value in one.items() if name.endswith("num_batches_tracked")}
    assert tracked == 6 * 4
    assert_same(one, many)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("with_batch_norm", {"pipeline": {"replicas": [2, 1], "microbatches": 4, "globalBatchSize": 16}}),
        ("with_instance_norm", {"parallelism": {"data": 2}}),
    ],
)
def test_statistics_of_replicas_are_those_of_one_process(gang, tmp_path, model, change):
    """Also where their microbatches alternate, or the norm does not count them.

    What none has used keeps no gradient, and does not decay.
    """
    one, many = states(gang, job(model, **change), tmp_path, 3 if "pipeline" in change else 2)
    assert_same(one, many)
    assert {float(many[name]) for name in one if name.endswith(".idle")} == {1.0}


def test_hooks_on_receive_buffers_do_not_pile_up(gang, tmp_path):
    """After many steps a stage's input carries as few hooks as after the first."""
    config = job("counting_hooks", totalSteps=12, args={"log": str(tmp_path / "hooks")})
    gang(config, ranks=2).succeeded()
    counts = [int(line) for line in (tmp_path / "hooks").read_text().split()]
    assert len(counts) >= 12 * 4
    assert max(counts) <= 2, list(itertools.islice(counts, 60))


@pytest.mark.parametrize("recompute", first_daily([True, False]))
def test_whatever_generator_a_layer_draws_from_the_curve_is_that_of_one_process(gang, same_curve, recompute):
    """Python's, numpy's and torch's; the forward that is computed again draws the same."""
    config = job("drawing_everywhere", training={"recompute": recompute})
    same_curve(gang(config, ranks=2), job("drawing_everywhere"))


CHANGED = "layer 1 changes its {}.weight in a forward, and replicas, repeats"
ONE_BUFFER = "'seen' of layer 0 and 'seen' of layer 1 are one buffer, which a forward changes"
SHARED = {"parallelism": {"data": 2, "zeroStage": 3}}


@pytest.mark.parametrize(
    ("kind", "ranks", "change"),
    [
        ("Skipping", 2, SHARED),
        ("Descending", 2, {"parallelism": {"data": 2}, "training": {"recompute": True}}),
        ("Mapped", 2, {}),
        ("Quantized", 2, {**SHARED, "training": {"optimizer": f"{MODELS}:own_adam"}}),
        ("Normed", 2, {"training": {"recompute": True}}),
        ("Watching", 2, {}),
        ("Bounded", 2, {"training": {"recompute": True}}),
        ("Masked", 2, {}),
        ("Doubling", 4, {"schedule": "LoopedBFS", "parallelism": {"data": 2}}),
        ("Doubling", 6, {"pipeline": {"replicas": [2, 2, 2], "microbatches": 4, "globalBatchSize": 16}}),
    ],
)
def test_layers_of_any_kind_train_as_in_one_process(gang, same_curve, kind, ranks, change):
    config = job("of_one_kind", args={"kind": kind}, **change)
    same_curve(gang(config, ranks=ranks), alone(config))


@pytest.mark.parametrize("model", ["of_a_loss_that_notes", "of_a_loss_that_averages"])
def test_a_loss_may_keep_what_it_computes(gang, same_curve, model):
    """Also on a rank that has another stage beside the last one; trials and evaluations change none of it."""
    config = job(model, schedule="LoopedBFS")
    same_curve(gang({**config, "evaluation": {"everySteps": 2, "batches": 1}}, ranks=2), config)


@pytest.mark.parametrize("model", ["of_several_lengths", "of_packed_sequences"])
def test_sizes_may_be_of_the_batches_or_among_integers_between_layers(gang, same_curve, model):
    config = job(model)
    same_curve(gang(config, ranks=2), config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (job("of_one_kind", args={"kind": "Bounded"}, parallelism={"data": 2}), CHANGED.format("rows")),
        (job("of_one_kind", args={"kind": "Bounded"}, schedule="PipeDream2BW"), CHANGED.format("rows")),
        (job("of_one_kind", args={"kind": "Clamped"}, **SHARED), CHANGED.format("linear")),
        (job("of_one_kind", args={"kind": "Clamped"}), CHANGED.format("linear")),
        (
            job("of_one_kind", args={"kind": "Freezing"}),
            "changes requires_grad of its linear.bias in a forward, and replicas, repeats",
        ),
        (
            job("of_one_kind", args={"kind": "LookingUp"}),
            "the gradient of rows of layer 1 is sparse, and norms and sums over ranks are of dense",
        ),
        (
            job("of_one_kind", args={"kind": "Listing"}),
            "layer 1 changes its buffer seen, and has another reference to it than the attribute",
        ),
        (
            job("of_one_kind", args={"kind": "Referring"}),
            "layer 1 changes its buffer seen, and has another reference to it than the attribute",
        ),
        (job("that_share_a_buffer"), ONE_BUFFER),
        (job("of_one_kind", args={"kind": "Making"}), "layer 1 makes its parameter scale in a forward"),
        (job("of_one_kind", args={"kind": "Remaking"}), "layer 1 makes its parameter linear.weight in a "),
        (job("of_a_loss_of_two"), "the loss is tuple, not a tensor. To fix: "),
        (
            job("of_one_kind", args={"kind": "Noting"}),
            "one of layers 0 to 1 keeps a tensor of shape [] that it has computed from its weights: a loss",
        ),
        (
            job("of_one_kind", args={"kind": "Complex"}, training={"optimizer": f"{MODELS}:adafactor"}),
            "adafactor ends with an error of its own where weights are complex",
        ),
    ],
    ids=[
        "max_norm",
        "versions",
        "zero",
        "data",
        "learns",
        "sparse",
        "listed",
        "referred",
        "shared",
        "made",
        "made_anew",
        "two",
        "noted",
        "complex",
    ],
)
def test_models_that_do_not_suit_the_job_are_refused(gang, fields, told):
    running = gang(fields, ranks=2)
    assert set(running.exit_codes().values()) == {2}
    assert told in running.errors()
    assert "Traceback" not in running.errors()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (job("of_one_kind", args={"kind": "LookingUp"}), "the gradient of rows of layer 1 is sparse"),
        (job("that_share_a_buffer"), ONE_BUFFER),
        (job("that_share_a_bounded_weight"), "layer 0 changes its rows.weight in a forward, and replicas"),
    ],
)
def test_one_rank_refuses_what_it_would_train_otherwise(fields, told):
    with pytest.raises(ConfigurationError, match=told):
        train_here(fields)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Counted", "Counted (seen) changes buffers in a forward: each replica has its own"),
        (
            "Clipping",
            "Clipping has a hook by register_post_accumulate_grad_hook: it sees the gradients of one",
        ),
    ],
)
def test_what_replicas_do_apart_is_told(gang, kind, told):
    running = gang(job("of_one_kind", args={"kind": kind}, parallelism={"data": 2}), ranks=2).succeeded()
    assert told in running.errors()
