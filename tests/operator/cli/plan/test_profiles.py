"""``ballast plan --profiles`` and ``--given``: layers measured by GPU type, and plans that exist already."""

import json

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner

PROFILE = """
layers:
  - {repeat: 3, forwardSeconds: 0, backwardSeconds: 0, heldBytes: 8, weightBytes: 4, outputBytes: 10,
     activationBytes: 6}
"""
CLUSTER = """
gpus: [{type: fast, count: 2}, {type: slow, count: 2}]
gpusPerServer: 2
bandwidth:
  insideServer: 1.0e+3
  betweenServers: 1.0e+3
  byType: [{gpus: [slow, fast], betweenServers: 10}]
"""
GIVEN = {
    "microbatchSize": 1,
    "microbatches": 4,
    "stages": [
        {"firstLayer": 0, "endLayer": 2, "gpus": [[0, 1]]},
        {"firstLayer": 2, "endLayer": 3, "gpus": [[2, 3]]},
    ],
}


WHOLE = {str(layer): [1, 2, 0.5] for layer in range(3)}


def sailor(forward, layers=3, tensor="2"):
    """Sailor's form: microbatches of one sample."""
    return {"1": {tensor: {str(layer): [forward, 2 * forward, 0.5] for layer in range(layers)}}}


@pytest.fixture
def run(tmp_path):
    """Run the command with profiles by file name."""

    def runner(profiles, *options, given=None, cluster=CLUSTER):
        (tmp_path / "profile.yaml").write_text(PROFILE)
        (tmp_path / "cluster.yaml").write_text(cluster)
        folder = tmp_path / "profiles"
        folder.mkdir(exist_ok=True)
        for name, content in profiles.items():
            (folder / name).write_text(json.dumps(content))
        arguments = [
            str(tmp_path / "profile.yaml"),
            str(tmp_path / "cluster.yaml"),
            "--profiles",
            str(folder),
        ]
        if given is not None:
            (tmp_path / "given.json").write_text(json.dumps(given))
            arguments += ["--given", str(tmp_path / "given.json")]
        return CliRunner().invoke(main, ["plan", *arguments, *options])

    return runner


def own(gpu_type, forward, **fields):
    """Our form, with bytes of the degree."""
    layer = {"repeat": 3, "forwardSeconds": forward, "backwardSeconds": 2 * forward, "optimizerSeconds": 0.5}
    return {"gpuType": gpu_type, "tensor": 2, "layers": [layer | fields]}


def test_a_given_plan_repeats_the_forwards_that_it_names(run):
    """Every second layer is the second: a forward of 1 s more in the first stage's last backward."""
    files = {"M_fast.json": sailor(1.0), "M_slow.json": sailor(3.0)}
    kept, some, every = (
        json.loads(run(files, "--output", "json", given=GIVEN | fields).output)["plans"][0]
        for fields in ({}, {"recompute": True, "recomputeEvery": 2}, {"recompute": True})
    )
    assert kept["stepSeconds"] + 1.0 == some["stepSeconds"] < every["stepSeconds"]
    assert some["job"]["training"] == {"recompute": True, "recomputeEvery": 2}
    # The layer after it keeps its input.
    assert some["stages"][1]["bytes"] == kept["stages"][1]["bytes"] + 10
    assert "1 of 2" in run(files, given=GIVEN | {"recompute": True, "recomputeEvery": 2}).output
    refused = run(files, given=GIVEN | {"recompute": True, "recomputeEvery": 10**12})
    assert refused.exit_code == 1 and "recomputeEvery: Input should be less" in refused.output
    refused = run(files, "--sweep", given=GIVEN)
    assert refused.exit_code == 2 and "--sweep: not with --given" in refused.output


@pytest.mark.parametrize("form", ["sailor", "own"])
def test_a_given_plan_is_predicted_from_what_each_type_was_measured_at(run, form):
    """Four microbatches, two layers on the fast type and one on the slow, a link of 10 bytes/s between them:
    the slow stage is busy for all four after the first one's way, then each stage updates its layers."""
    files = {"M_fast.json": sailor(1.0), "M_slow.json": sailor(3.0)}
    if form == "own":
        files = {"a.json": [own("fast", 1.0)], "b.json": own("slow", 3.0)}
    done = run(files, "--output", "json", given=GIVEN)
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)["plans"][0]
    first, link, last = 2 * 1.0, 1.0, 3.0 + 6.0
    assert plan["stepSeconds"] == pytest.approx(first + link + 4 * last + link + 2 * 2.0 + 2 * 0.5)
    assert (plan["pipeline"], plan["tensor"], plan["data"]) == (2, 2, 1)


def test_bytes_that_were_measured_at_the_degree_count(run):
    """Held 5 in place of 8 / 2 a layer."""
    files = {"a.json": [own("fast", 1.0), own("slow", 3.0)]}
    formula = json.loads(run(files, "--output", "json", given=GIVEN).output)["plans"][0]["stages"][1]["bytes"]
    files = {"a.json": [own("fast", 1.0, heldBytes=5), own("slow", 3.0, heldBytes=5)]}
    found = json.loads(run(files, "--output", "json", given=GIVEN).output)["plans"][0]["stages"][1]["bytes"]
    # A layer's half of 8 and 6, its output, and room for two messages; measured: 5 alone.
    assert (formula, found) == (4 + 3 + 10 + 20 - 2 + 2, 5)


@pytest.mark.parametrize("shared", ["0", "3"])
def test_a_plan_made_from_profiles_is_predicted_alike_when_it_is_given(run, tmp_path, shared):
    """The output of one call is the input of the next; what replicas share is the plan's unless asked."""
    files = {"M_fast.json": sailor(1.0, tensor="1"), "M_slow.json": sailor(3.0, tensor="1")}
    made = run(files, "--planner", "best", "--zero-stage", shared, "--output", "json")
    assert made.exit_code == 0, made.output
    assert ('"zeroStage": 3' in made.output) == (shared == "3")
    again = json.loads(run(files, "--output", "json", given=json.loads(made.output)).output)
    assert again["plans"][0] == {**json.loads(made.output)["plans"][0], "predictedSeconds": None}
    for other in ("0", "3"):
        options = ("--zero-stage", other, "--output", "json")
        said = run(files, *options, given=json.loads(made.output)).output
        assert ('"zeroStage": 3' in said) == (other == "3")


@pytest.mark.parametrize(
    ("files", "options", "given", "said"),
    [
        ({"M_fast.json": {"1": {"2": {"0": [1, 2]}}}}, (), GIVEN, "M_fast.json: 1.2.0: 2 entries, below 3"),
        ({"M_fast.json": {"1": {"2": {"0": [1, -2, 3]}}}}, (), GIVEN, "1.2.0[1]: -2 is below 0"),
        ({"M_fast.json": {"1": {"2": {"1": [1, 2, 3]}}}}, (), GIVEN, "1.2: layer 0 of 1 is missing"),
        ({"a.json": {"gpuType": "fast", "tensor": 0, "layers": []}}, (), GIVEN, "tensor: 0 is below 1"),
        (
            {"a.json": {"gpuType": "fast", "layerSeconds": [1]}},
            (),
            GIVEN,
            "layerSeconds: a report's are of a step",
        ),
        (
            {"M_fast.json": sailor(1), "N_fast.json": sailor(2)},
            (),
            GIVEN,
            "N_fast.json: fast at tensor degree 2",
        ),
        ({"M_fast.json": sailor(1), "M_slow.json": sailor(1, 2)}, (), GIVEN, "different numbers of layers"),
        ({"M_fast.json": sailor(1)}, (), GIVEN, "no profile is of GPU type slow, only of fast"),
        ({"M_fast.json": sailor(1, 2), "M_slow.json": sailor(1, 2)}, (), GIVEN, "have 2 layers, the model 3"),
        ({"M_fast.json": sailor(1), "M_slow.json": sailor(1)}, (), None, "--planner best, 2bw, megatron"),
        (
            {"M_fast.json": sailor(1), "M_slow.json": sailor(1)},
            (),
            GIVEN | {"microbatchSize": 3},
            "only at 2 x 1",
        ),
        (
            {"M_fast.json": sailor(1), "M_slow.json": sailor(1)},
            (),
            {"stages": []},
            "stages: List should have",
        ),
        ({"M_fast.json": sailor(1)}, (), {"plans": []}, "To fix: make the plan without --schedule"),
        ({}, (), GIVEN, "--profiles: no profile in"),
        *(
            (
                {"M_fast.json": {"3": {"1": WHOLE}}, "M_slow.json": {"3": {"1": WHOLE}}},
                ("--planner", planner),
                None,
                "no degree over 4 GPUs was profiled and divides the batch. To fix: another --batch-size, or",
            )
            for planner in ("best", "2bw", "megatron")
        ),
    ],
)
def test_what_is_no_profile_or_no_plan_is_refused_with_the_field_and_what_to_change(
    run, files, options, given, said
):
    """Bad files, files of several models, degrees that were not measured."""
    done = run(files, *options, given=given)
    assert done.exit_code != 0
    assert said in done.output


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([(0, 2, [[0, 1]]), (1, 3, [[2, 3]])], "begin with layer 2"),
        ([(0, 2, [[0, 1]])], "end with layer 1 of 3"),
        ([(0, 2, [[0, 1]]), (2, 3, [[1, 3]])], "name each at most once, from 0 to 3"),
        ([(0, 2, [[0, 1]]), (2, 3, [[2]])], "tensor degrees [1, 2]"),
    ],
)
def test_a_plan_for_other_layers_or_gpus_is_refused(run, stages, said):
    given = GIVEN | {"stages": [{"firstLayer": a, "endLayer": b, "gpus": gpus} for a, b, gpus in stages]}
    done = run({"M_fast.json": sailor(1), "M_slow.json": sailor(1)}, given=given)
    assert done.exit_code == 1
    assert said in done.output


LINKS = "{gpus: [slow, fast], betweenServers: 10}"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("fast, count: 2}", "fast, count: 2, speed: 2}", "leave the speed out"),
        ("[slow, fast]", "[slow, other]", "bandwidth.byType has links of ['other']"),
        (LINKS, f"{LINKS}, {LINKS}", "states betweenServers of ['slow', 'fast'] twice: leave one out"),
        (LINKS, f"{LINKS}, {{gpus: [fast, slow], betweenServers: 3}}", "of ['fast', 'slow'] twice"),
    ],
    ids=["a speed beside a profile", "no such type", "a pair twice", "a pair turned round"],
)
def test_links_and_speeds_that_contradict_are_refused(run, written, instead, said):
    files = {"M_fast.json": sailor(1), "M_slow.json": sailor(1)}
    assert written in CLUSTER
    assert said in run(files, given=GIVEN, cluster=CLUSTER.replace(written, instead)).output
