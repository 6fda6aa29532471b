"""Configurations: defaults, overrides, and refusals that name the field."""

import pytest
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.config import read_job_config
from ballast_trainer.environment import LaunchedRank, seconds_from
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.gpu_emulation import emulated_speed
from ballast_trainer.launch import ValidatedJob

PLAIN = {"totalSteps": 10, "model": {"name": "gpt"}}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"totalSteps": 0}, "totalSteps", "below 1"),
        ({"pipeline": {"minStages": 3, "maxStages": 2}}, "pipeline.minStages", "minStages: 3, maxStages: 2"),
        ({"model": {"name": "gtp"}}, "model.name", "did you mean 'gpt'"),
        ({"model": {"name": "nowhere:model"}}, "model.name", "cannot load"),
        ({"model": {"name": "json:dumps", "args": {"obj": 1}}}, "model.name", "not a Model"),
        ({"model": {"name": "gpt", "args": {"depth": 3}}}, "model.args", "depth"),
        ({"model": {"name": "gpt", "layers": 5, "args": {"layers": 6}}}, "model.layers", "has 6 layers"),
    ],
)
def test_a_job_that_cannot_train_is_refused(change, field, words):
    """By its configuration, and by what its model can be; the refusal names the field."""
    with pytest.raises(ConfigurationError) as caught:
        ValidatedJob.from_mapping({**PLAIN, **change})
    assert caught.value.field == field
    assert words in str(caught.value)


def test_all_wrong_fields_are_named_at_once():
    """The first in the error's field, the others in lines of its text."""
    with pytest.raises(ConfigurationError) as caught:
        read_job_config({**PLAIN, "totalSteps": 0, "checkpoint": {"keep": 0}})
    assert caught.value.field == "totalSteps"
    assert str(caught.value).splitlines()[1].startswith("checkpoint.keep: 0 is below 1")


def test_assignments_override_the_file(tmp_path):
    """``--set`` takes YAML values and makes the objects on the way."""
    path = tmp_path / "config.yaml"
    path.write_text("totalSteps: 10\nmodel: {name: gpt}\n")
    assignments = ("totalSteps=20", "model.args.hidden_size=64", "rebalance.min_gain=0.1")
    assert read_config(path, assignments) == {
        "totalSteps": 20,
        # A builder's arguments keep the names that Python gives them.
        "model": {"name": "gpt", "args": {"hidden_size": 64}},
        "rebalance": {"minGain": 0.1},
    }


def test_an_assignment_reaches_into_a_list(tmp_path):
    """By the place from 0; a number with an exponent is a number, in the file too."""
    path = tmp_path / "config.yaml"
    path.write_text("dynamics: [{kind: freezing, target: 0.5}]\ntraining: {weightDecay: 1e-2}\n")
    found = read_config(path, ("dynamics.0.target=0.25", "training.learning_rate=1e-3"))
    assert found["dynamics"] == [{"kind": "freezing", "target": 0.25}]
    assert found["training"] == {"weightDecay": 0.01, "learningRate": 0.001}


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1", b"", b"a: [1"])
def test_a_file_that_is_no_configuration_is_refused_with_the_reason(tmp_path, content):
    """Not text, not a mapping, not YAML."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"--config: .*config\.yaml(.|\n)*To fix"):
        read_config(path, ())


@pytest.mark.parametrize(
    "assignment",
    ["totalSteps", "=3", "totalSteps.deep=3", "model={name", "dynamics.1.target=3", "dynamics.x=3"],
)
def test_an_assignment_that_cannot_be_made_is_refused(tmp_path, assignment):
    """It says which."""
    path = tmp_path / "config.yaml"
    path.write_text("totalSteps: 10\ndynamics: [{kind: freezing}]\n")
    with pytest.raises(ConfigurationError, match="--set"):
        read_config(path, (assignment,))


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_rank_has_the_place_that_torchrun_gives_it():
    """And is alone where nothing is set."""
    launched = LaunchedRank.from_environment(TORCHRUN)
    assert (launched.rank, launched.ranks, launched.address, launched.port) == (1, 2, "host", 29500)
    assert LaunchedRank.from_environment({}) == LaunchedRank()


@pytest.mark.parametrize(("variables", "count"), [({}, 2), ({"LOCAL_WORLD_SIZE": "4"}, 4)])
def test_ranks_of_this_machine_are_those_that_torchrun_started(variables, count):
    """At least those up to this one, where a launcher does not say."""
    assert LaunchedRank.from_environment({**TORCHRUN, **variables}).local_ranks == count


@pytest.mark.parametrize(
    ("name", "text"),
    [("WORLD_SIZE", "two"), ("RANK", "2"), ("RANK", "-1"), ("MASTER_ADDR", ""), ("MASTER_PORT", "http")],
)
def test_a_place_that_makes_no_sense_is_refused(name, text):
    """With the variable's name and what to do."""
    with pytest.raises(ConfigurationError, match=f"^{name}: .*To fix: start with torchrun"):
        LaunchedRank.from_environment({**TORCHRUN, name: text})


def test_the_emulated_factor_is_that_of_the_family_or_the_default():
    """Nothing set, nothing emulated."""
    environment = {"BALLAST_EMULATED_SLOWDOWN": '{"transformer": 10, "default": 12.5}'}
    assert emulated_speed(environment, "transformer").factor == 10
    assert emulated_speed(environment, "recurrent").factor == 12.5
    assert emulated_speed({}, "recurrent") is None


@pytest.mark.parametrize("text", ["fast", "[1]", '{"default": 0.5}', '{"default": "slow"}'])
def test_a_wrong_factor_is_refused(text):
    """A factor below 1 would be a speed-up, which padding cannot give."""
    with pytest.raises(ConfigurationError, match="BALLAST_EMULATED_SLOWDOWN"):
        emulated_speed({"BALLAST_EMULATED_SLOWDOWN": text}, "transformer")


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_period_that_is_none_is_refused(text):
    """A hang that is never seen, or seen at once, would be the result."""
    assert seconds_from({"BALLAST_HANG_SECONDS": "2.5"}, "BALLAST_HANG_SECONDS") == 2.5
    assert seconds_from({}, "BALLAST_HANG_SECONDS") is None
    with pytest.raises(ConfigurationError, match="BALLAST_HANG_SECONDS"):
        seconds_from({"BALLAST_HANG_SECONDS": text}, "BALLAST_HANG_SECONDS")
