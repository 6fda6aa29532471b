"""``ballast plan``: from two files to a plan that can be read, scripted and looked at."""

import json

import pytest
import yaml
from ballast_operator.cli.main import main
from ballast_operator.views.spec import read_spec
from ballast_policies.planning.planners.registry import PLANNERS
from ballast_policies.planning.schedules.registry import trained_schedules
from ballast_policies.planning.schedules.schedule import Action
from click.testing import CliRunner

from tests.support.examples import first_fast

PROFILE = """
layers:
  - {name: embedding, forwardSeconds: 0.01, backwardSeconds: 0.02, heldBytes: 100, outputBytes: 10}
  - {name: block, repeat: 10, forwardSeconds: 0.03, backwardSeconds: 0.06, heldBytes: 50, outputBytes: 10}
  - {name: head, forwardSeconds: 0.04, backwardSeconds: 0.08, heldBytes: 100, outputBytes: 10}
"""
BIG = """
microbatchSize: 2
layers:
  - {repeat: 2, forwardSeconds: 1, backwardSeconds: 2, heldBytes: 1e9}
  - {forwardSeconds: 1, backwardSeconds: 2, heldBytes: 31e9}
"""
CLUSTER = """
gpus:
  - {type: a100, count: 2, speed: 2.0}
  - {type: v100, count: 2}
gpusPerServer: 2
bandwidth: {insideServer: 1.0e+6, betweenServers: 1.0e+4}
"""


@pytest.fixture
def run(tmp_path):
    """Run the command on a profile and a cluster; JSON where asked for."""

    def runner(*options, profile=PROFILE, cluster=CLUSTER):
        (tmp_path / "profile.yaml").write_text(profile)
        (tmp_path / "cluster.yaml").write_text(cluster)
        arguments = ["plan", str(tmp_path / "profile.yaml"), str(tmp_path / "cluster.yaml"), *options]
        return CliRunner().invoke(main, arguments)

    return runner


def test_a_pipeline_plan_as_json(run):
    """All layers are on stages, all GPUs used, and the prediction comes with its parts."""
    answer = json.loads(run("--output", "json").output)
    assert answer["planner"] == "pipeline"
    assert answer["stages"][0]["firstLayer"] == 0
    assert answer["stages"][-1]["endLayer"] == 12
    assert sorted(stage["gpuType"] for stage in answer["stages"]) == ["a100", "a100", "v100", "v100"]
    assert answer["stepSeconds"] < answer["evenStepSeconds"]
    bubble = answer["bubble"]
    assert bubble["inherent"] + bubble["dynamic"] == pytest.approx(bubble["idle"])
    assert answer["inFlight"] == [4, 3, 2, 1]


def test_a_pipeline_plan_as_text(run):
    """A row a stage, the prediction marked as one, a time line."""
    result = run()
    assert result.exit_code == 0
    assert "s a step (simulated)" in result.output
    assert "rank  3" in result.output


def test_a_jobs_report_is_a_profile(run):
    """Seconds per layer of a running job; what is assumed about them is said."""
    report = json.dumps(
        {"epoch": 3, "step": 70, "layerSeconds": [0.1, 0.2, 0.3, 0.1], "layerBytes": [1, 2, 3, 4]}
    )
    result = run(profile=report)
    assert result.exit_code == 0
    assert "a third and two thirds are assumed" in result.output


def test_what_a_running_job_measures_apart_is_not_assumed(run):
    """Forward and optimizer seconds, and activation bytes for each microbatch in flight, as reported."""
    measured = {
        "layerSeconds": [0.5] * 4,
        "layerForwardSeconds": [0.1] * 4,
        "layerOptimizerSeconds": [0.1] * 4,
        "layerBytes": [100] * 4,
        "layerActivationBytes": [10] * 4,
    }
    result = run("--microbatches", "4", "--output", "json", profile=json.dumps(measured))
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert [stage["bytes"] for stage in plan["stages"]] == [100 + 10 * n for n in plan["inFlight"]]
    assert plan["inFlight"] == [4, 3, 2, 1]
    assert "assumed" not in run(profile=json.dumps(measured)).output


def test_the_sweep_shows_fewer_gpus(run):
    """From one GPU to all; each more is no slower."""
    rows = json.loads(run("--sweep", "--output", "json").output)["sweep"]
    assert [row["gpus"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["idle"] == pytest.approx(0)
    assert rows[3]["stepSeconds"] < rows[0]["stepSeconds"]


def test_the_step_is_written_as_trace_picture_and_csv(run, tmp_path):
    """Chrome's JSON, SVG, and a CSV with a line a rank, of three actions for each microbatch."""
    trace, picture, table = (tmp_path / name for name in ("step.json", "step.svg", "step.csv"))
    options = ("--trace", str(trace), "--picture", str(picture), "--csv", str(table))
    assert run("--schedule", "ZeroBubbleH1", *options).exit_code == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")
    rows = [[Action.parse(entry) for entry in line.split(",")] for line in table.read_text().splitlines()]
    assert [{action.stage for action in row} for row in rows] == [{rank} for rank in range(len(rows))]
    assert [len(row) for row in rows] == [3 * 8] * len(rows)


@pytest.mark.parametrize("schedule", trained_schedules())
def test_the_trainer_runs_a_pipeline_plan_of_each_schedule(run, schedule):
    """Its fields say how many stages a rank has where the schedule leaves that open, and there alone."""
    cluster = "gpus: [{type: a100, count: 4}]"
    found = json.loads(run("--schedule", schedule, "--output", "json", cluster=cluster).output)
    assert found["refused"] is None
    assert sum(found["job"]["plan"]["layers"]) == 12


def test_pipedream_replicates_stages(run):
    """Tiny weights on equal GPUs: one stage on all."""
    cluster = "gpus: [{type: a100, count: 4}]\nbandwidth: {insideServer: 1.0e+6, betweenServers: 1.0e+6}"
    answer = json.loads(run("--planner", "pipedream", "--output", "json", cluster=cluster).output)
    assert answer["configuration"] == "4"
    assert answer["activeMinibatches"] == 1
    assert "all are taken for the slowest" in run("--planner", "pipedream").output


def test_amp_proposes_strategies_best_first(run):
    """Degrees multiply to the GPUs."""
    options = ("--planner", "amp", "--batch-size", "16", "--evaluations", "60", "--output", "json")
    strategies = json.loads(run(*options).output)["strategies"]
    seconds = [strategy["stepSeconds"] for strategy in strategies]
    assert seconds == sorted(seconds)
    assert all(s["tensor"] * s["data"] * s["pipeline"] == 4 for s in strategies)


@pytest.mark.parametrize("name", list(PLANNERS.builtin))
@pytest.mark.parametrize(
    "cluster",
    first_fast(
        [
            CLUSTER,
            "gpus: [{type: a100, count: 4}]",
            CLUSTER.replace("gpusPerServer: 2", "gpusPerServer: 3"),
            CLUSTER.replace("gpusPerServer: 2", "gpusPerServer: 8"),
        ]
    ),
    ids=["two servers", "free links", "a server that is not full", "one server"],
)
def test_every_planner_answers_on_every_cluster_with_the_same_keys(run, name, cluster):
    """A plan's step by the one cost model, its bytes, its GPUs, and what a TrainingJob says to run it, or why
    it cannot; `best` is no slower than any that can be run.
    """
    answer = json.loads(run("--planner", name, "--output", "json", "--picture", cluster=cluster).output)
    best = json.loads(run("--planner", "best", "--output", "json", cluster=cluster).output)
    (plan, *_) = answer["plans"]
    assert answer["stepSeconds"] >= plan["stepSeconds"] * (1 - 1e-9)
    assert best["boundSeconds"] <= best["stepSeconds"]
    assert plan["refused"] or best["stepSeconds"] <= plan["stepSeconds"] * (1 + 1e-9)
    used = [gpu for stage in plan["stages"] for group in stage["gpus"] for gpu in group]
    assert len(used) == len(set(used)) == plan["gpus"] <= 4
    assert [stage["firstLayer"] for stage in plan["stages"]][1:] == [
        stage["endLayer"] for stage in plan["stages"][:-1]
    ]
    assert plan["microbatches"] * plan["microbatchSize"] == 8
    job = plan["job"]
    assert job["pipeline"]["globalBatchSize"] == 8
    types = [stage["gpuTypes"] for stage in plan["stages"]]
    if name in {"pipeline", "best"} or (name != "2bw" and max(map(len, types)) == 1):
        assert plan["refused"] is None
    elif name in {"megatron", "amp"} and max(map(len, types)) > 1:
        assert "GPUs of a100 and v100" in plan["refused"]
    assert "stage  0" in answer["picture"] or "rank  0" in answer["picture"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best", "pipedream", "2bw", "megatron", "amp"])
def test_a_batch_beyond_all_measure_is_planned_without_being_played(run, name):
    """A step's length follows from shorter ones; best has no more microbatches than a job may have."""
    few = "layers: [{repeat: 6, forwardSeconds: 0.03, backwardSeconds: 0.06, heldBytes: 50, outputBytes: 10}]"
    result = run("--planner", name, "--batch-size", "1000000000", "--output", "json", profile=few)
    assert result.exit_code == 0, result.output
    (plan, *_) = json.loads(result.output)["plans"]
    assert plan["microbatches"] * plan["microbatchSize"] == 10**9
    assert plan["stepSeconds"] > 0
    if name == "best":
        assert plan["refused"] is None and plan["microbatches"] <= 65_536


def test_top_plans_are_the_fastest_first_and_distinct(run):
    """Each of another shape; the first is that of one plan."""
    answer = json.loads(run("--planner", "best", "--top", "4", "--output", "json").output)
    seconds = [plan["stepSeconds"] for plan in answer["plans"]]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    assert answer["stepSeconds"] == seconds[0]
    alone = json.loads(run("--planner", "best", "--output", "json").output)
    assert alone["stepSeconds"] == pytest.approx(seconds[0])
    assert alone["optimal"]


@pytest.mark.parametrize("name", ["pipeline", "best", "amp"])
def test_a_plan_over_two_gpu_types_applies_as_it_is_printed(run, name):
    """A TrainingJob with the printed fields asks for these GPUs, and starts with exactly these layers."""
    (plan, *_) = json.loads(run("--planner", name, "--output", "json").output)["plans"]
    printed = yaml.safe_load(run("--planner", name, "--output", "yaml").output)["spec"]
    assert printed == plan["job"]
    job = {
        "metadata": {"name": "planned", "namespace": "team"},
        "spec": {
            "totalSteps": 10,
            "model": {"name": "gpt", "layers": plan["stages"][-1]["endLayer"]},
            "checkpoint": {"path": "/checkpoints"},
            "template": {"spec": {"containers": [{"name": "trainer"}]}},
            **printed,
        },
    }
    spec, why = read_spec(job)
    assert spec is not None, why
    assert [(s.first_layer, s.end_layer) for s in spec.first_stages(spec.largest_gang)] == [
        (stage["firstLayer"], stage["endLayer"]) for stage in plan["stages"]
    ]
    asked = [kind for kind, gpus in spec.planned_gpus for _ in range(gpus)]
    used = [stage["gpuTypes"] * (plan["tensor"] * plan["data"]) for stage in plan["stages"]]
    assert asked == [kind for each in used for kind in each]


def test_no_patch_is_printed_of_a_plan_that_no_job_runs(run):
    result = run("--schedule", "ZeroBubbleH1", "--output", "yaml")
    assert result.exit_code == 1
    assert (
        "no TrainingJob runs this plan: a gang in several pools has a schedule whose speed" in result.output
    )


def test_a_plan_that_the_trainer_does_not_run_says_so(run):
    """DualPipeV is simulated only: planned, with the reason for which the trainer refuses it."""
    text = run("--schedule", "DualPipeV").output
    assert "The trainer refuses this plan: schedule DualPipeV is simulated only" in text


def test_a_plan_of_parallel_pipelines_without_a_flush_is_one_that_the_trainer_runs(run):
    """2BW as published: no refusal."""
    result = run("--planner", "2bw", cluster="gpus: [{type: a100, count: 4}]")
    assert result.exit_code == 0, result.output
    assert "refuses" not in result.output


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_picture_may_be_asked_for_anywhere(tmp_path, place):
    """The words after ``--picture`` are still PROFILE and CLUSTER."""
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    files = [str(tmp_path / "profile.yaml"), str(tmp_path / "cluster.yaml")]
    words = {"before": ["--picture", *files], "between": [files[0], "--picture", files[1]]}.get(
        place, [*files, "--picture"]
    )
    result = CliRunner().invoke(main, ["plan", *words, "--planner", "best"])
    assert result.exit_code == 0, result.output
    assert "stage  0" in result.output


LAYER = "{repeat: 2000, forwardSeconds: 1, backwardSeconds: 1}"


@pytest.mark.parametrize(
    ("files", "options", "want"),
    [
        ({"profile": "layers: []"}, (), "give either layers, or layerSeconds"),
        ({"profile": "{"}, (), "neither YAML nor JSON"),
        ({"profile": "microbatchSize: 1\nmicrobatchSize: 2"}, (), "given twice"),
        ({"cluster": "gpus: []"}, (), "gpus"),
        ({"cluster": "gpus: [{type: a, count: 0}]"}, (), "gpus.0.count"),
        ({"cluster": "gpus: [{type: a, count: 1}, {type: a, count: 2}]"}, (), "listed twice"),
        ({"cluster": "gpus: [{type: a, count: 5000}]"}, (), "5000 GPUs are more than the 4096"),
        ({"profile": f"layers: [{LAYER}, {LAYER}]"}, (), "4000 layers are more than the 2000"),
        ({"cluster": "gpus: [{type: a, count: 99}]"}, (), "cannot be cut into 99 stages"),
        ({"cluster": "gpus: [{type: a, count: 2, memoryBytes: 200}]"}, (), "do not fit the memory"),
        *(
            (
                {"profile": BIG, "cluster": f"gpus: [{{type: a, count: 4, memoryBytes: {has}}}]"},
                ("--planner", name),
                said,
            )
            for name in PLANNERS.builtin
            for has, said in (
                ("1.6e10", "layer 2 needs 31 GB, the largest GPU has 16"),
                ("30999999999", "layer 2 needs 31 GB, the largest GPU has 30.999999999"),
            )
        ),
        (
            {},
            ("--schedule", "Interleaved1F1B", "--chunks", "2", "--microbatches", "9"),
            "To fix: use 8 or 12",
        ),
        ({}, ("--schedule", "PipeDream2BW", "--microbatches", "6"), "To fix: use 8"),
        (
            {},
            ("--planner", "ptdp"),
            "--planner: 'ptdp' is not one of pipeline, best, pipedream, 2bw, megatron, amp",
        ),
        ({}, ("--microbatches", "1000000000"), "at most 1000000 are simulated. To fix: fewer, larger"),
        ({}, ("--planner", "best", "--schedule", "GPipe"), "best plans 1F1B, not GPipe"),
        ({"profile": BIG}, ("--batch-size", "3"), "not a multiple of the profile's microbatchSize of 2"),
        ({}, ("--schedule", "2F2B"), "--schedule: '2F2B' is not one of 1F1B"),
        ({"profile": f"tensor: 2\n{BIG}"}, (), "tensor: 2 has a GPU's part of each layer"),
        (
            {"profile": BIG},
            ("--planner", "best", "--zero-stage", "1"),
            "layers hold bytes, and weightBytes does not say how many of them replicas gather",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_field_and_the_reason(run, files, options, want):
    """Exit code 1, one line, no traceback."""
    result = run(*options, **files)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert want in result.output.replace("\n", " ")


@pytest.mark.parametrize("planner", ["best", "megatron", "amp"])
def test_replicas_that_share_their_state_fit_smaller_gpus(run, planner):
    """The layers fit no GPU's memory whole; the plan says zeroStage, and the trainer runs it."""
    profile = (
        "layers: [{repeat: 2, forwardSeconds: 1, backwardSeconds: 2, heldBytes: 16e9, weightBytes: 4e9}]"
    )
    links = "{insideServer: 1.0e+12, betweenServers: 1.0e+12}"
    cluster = f"{{gpus: [{{type: a, count: 8, memoryBytes: 15e9}}], bandwidth: {links}}}"
    options = ("--planner", planner, "--max-tensor", "1", "--batch-size", "8", "--output", "json")
    refused = run(*options, profile=profile, cluster=cluster)
    assert refused.exit_code == 1 and "layer 0 needs 16 GB, the largest GPU has 15" in refused.output
    result = run(*options, "--zero-stage", "1", profile=profile, cluster=cluster)
    assert result.exit_code == 0, result.output
    (plan, *_) = json.loads(result.output)["plans"]
    assert (plan["fits"], plan["refused"]) == (True, None)
    assert plan["job"]["parallelism"] == {"tensor": 1, "data": plan["data"], "zeroStage": 1}


def test_a_planner_of_replicas_that_share_nothing_refuses_to_share(run):
    result = run("--zero-stage", "1")
    assert result.exit_code == 2
    assert (
        "--zero-stage: planner pipeline shares nothing. To fix: --planner best, megatron, amp"
        in result.output
    )


@pytest.mark.parametrize("option", ["--sweep", "--trace", "--picture", "--csv"])
def test_what_a_planner_does_not_simulate_cannot_be_drawn(run, tmp_path, option):
    """It is refused, and no file is written."""
    path = tmp_path / "out"
    result = run("--planner", "pipedream", option, *(() if option == "--sweep" else (str(path),)))
    assert result.exit_code == 2
    assert "planner pipedream simulates no step" in result.output
    assert not path.exists()


def test_a_file_that_is_no_text_is_refused_in_words(tmp_path):
    """A checkpoint given for a profile: one line, no traceback."""
    (tmp_path / "profile.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    result = CliRunner().invoke(
        main, ["plan", str(tmp_path / "profile.yaml"), str(tmp_path / "cluster.yaml")]
    )
    assert result.exit_code == 1
    assert "neither YAML nor JSON" in result.output


@pytest.mark.parametrize(
    ("gpu", "limit"),
    [
        ("type: Tesla-V100-SXM2-16GB", 16),
        ("type: v100-sxm2-16gb", 16),
        ("type: Tesla-V100-SXM2-16GB, memoryBytes: 20e9", 20),
        ("type: Tesla-V100-SXM2-16GB, memoryBytes: 40e9", None),
        ("type: Tesla-V100-SXM2-16GB, memoryBytes: null", None),
        ("type: v100", None),
    ],
)
def test_memory_that_is_not_stated_is_the_catalogues(run, gpu, limit):
    """By the full name alone; what is stated wins, also that there is no limit."""
    cluster = f"gpus: [{{{gpu}, count: 2}}]"
    for planner in ("pipeline", "best"):
        result = run("--planner", planner, profile=BIG, cluster=cluster)
        if limit is None:
            assert result.exit_code == 0, result.output
            assert "catalogue" not in result.output
        else:
            assert f"the largest GPU has {limit}" in result.output


def test_the_plan_tells_which_memory_is_the_catalogues(run):
    """In text and JSON, for those types alone that state none."""
    cluster = "gpus: [{type: Tesla-T4, count: 2}, {type: v100, count: 2, memoryBytes: 1e9}]"
    assert "Memory from the catalogue of GPUs (ballast gpus): Tesla-T4 16 GB." in run(cluster=cluster).output
    answer = json.loads(run("--output", "json", cluster=cluster).output)
    assert answer["catalogueMemoryBytes"] == {"Tesla-T4": 16e9}
    assert "catalogueMemoryBytes" not in json.loads(run("--output", "json").output)
