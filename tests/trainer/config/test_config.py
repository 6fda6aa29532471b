"""Configurations: defaults, overrides, and refusals that name the field."""

import sys
import textwrap

import pytest
from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.cli.run import unpartitioned
from ballast_trainer.config import read_job_config
from ballast_trainer.dynamics.registry import warn_without_effect
from ballast_trainer.environment import TorchrunRank, seconds_from
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.gpu_emulation import emulated_speed
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.models.registry import build_model, data_source, load_callable

PLAIN = {"totalSteps": 10, "model": {"name": "gpt"}}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"pipeline": {"minStages": 3, "maxStages": 2}}, "pipeline.minStages", "minStages: 3, maxStages: 2"),
        ({"model": {"name": "gtp"}}, "model.name", "did you mean 'gpt'"),
        ({"model": {"name": "nowhere:model"}}, "model.name", "cannot load"),
        ({"model": {"name": "json:dumps", "args": {"obj": 1}}}, "model.name", "not a Model"),
        ({"model": {"name": "gpt", "args": {"depth": 3}}}, "model.args", "depth"),
        ({"model": {"name": "gpt", "layers": 5, "args": {"layers": 6}}}, "model.layers", "has 6 layers"),
        ({"model": {"name": "gpt", "args": {"dim": 30}}}, "model.args", "To fix"),
        ({"model": {"name": "gpt", "layers": 2}}, "model.args", "To fix"),
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


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1", b"", b"a: [1", None])
def test_a_file_that_is_no_configuration_is_refused_with_the_reason(tmp_path, content):
    """Not text, not a mapping, not YAML, not there."""
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"--config: .*config\.yaml(.|\n)*To fix"):
        read_config(path, ())


@pytest.mark.parametrize(
    "assignment",
    ["totalSteps", "=3", "totalSteps.deep=3", "model={name", "dynamics.1.target=3", "dynamics.x=3"],
)
def test_an_assignment_that_cannot_be_made_is_refused(tmp_path, assignment):
    path = tmp_path / "config.yaml"
    path.write_text("totalSteps: 10\ndynamics: [{kind: freezing}]\n")
    with pytest.raises(ConfigurationError, match="--set"):
        read_config(path, (assignment,))


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_rank_has_the_place_that_torchrun_gives_it():
    """And is alone where nothing is set."""
    launched = TorchrunRank.from_environment(TORCHRUN)
    assert (launched.rank, launched.ranks, launched.address, launched.port) == (1, 2, "host", 29500)
    assert TorchrunRank.from_environment({}) == TorchrunRank()


@pytest.mark.parametrize(("variables", "count"), [({}, 2), ({"LOCAL_WORLD_SIZE": "4"}, 4)])
def test_ranks_of_this_machine_are_those_that_torchrun_started(variables, count):
    """At least those up to this one, where a launcher does not say."""
    assert TorchrunRank.from_environment({**TORCHRUN, **variables}).local_ranks == count


@pytest.mark.parametrize(
    ("name", "text"),
    [("WORLD_SIZE", "two"), ("RANK", "2"), ("RANK", "-1"), ("MASTER_ADDR", ""), ("MASTER_PORT", "99999")],
)
def test_a_place_that_makes_no_sense_is_refused(name, text):
    """With the variable's name and what to do."""
    with pytest.raises(ConfigurationError, match=f"^{name}: .*To fix: start with torchrun"):
        TorchrunRank.from_environment({**TORCHRUN, name: text})


def test_the_emulated_factor_is_that_of_the_family_or_the_default():
    """Nothing set, nothing emulated."""
    environment = {"BALLAST_EMULATED_SLOWDOWN": '{"transformer": 10, "default": 12.5}'}
    assert emulated_speed(environment, "transformer").factor == 10
    assert emulated_speed(environment, "recurrent").factor == 12.5
    assert emulated_speed({}, "recurrent") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("SLOWDOWN", text) for text in ("fast", "[1]", '{"default": 0.5}', '{"default": "slow"}')]
    + [("STRAGGLER", text) for text in ("inf", "1e400", "0.5")],
)
def test_a_wrong_factor_is_refused(name, text):
    """A factor below 1 would be a speed-up, which padding cannot give; with a large one no step ends."""
    with pytest.raises(ConfigurationError, match=rf"BALLAST_EMULATED_{name}: .*To fix"):
        emulated_speed({f"BALLAST_EMULATED_{name}": text}, "transformer")


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
def test_a_period_that_is_none_is_refused(text):
    """A hang that is never seen, or seen at once, would be the result."""
    assert seconds_from({"BALLAST_HANG_SECONDS": "2.5"}, "BALLAST_HANG_SECONDS") == 2.5
    assert seconds_from({}, "BALLAST_HANG_SECONDS") is None
    with pytest.raises(ConfigurationError, match=r"BALLAST_HANG_SECONDS: .*To fix"):
        seconds_from({"BALLAST_HANG_SECONDS": text}, "BALLAST_HANG_SECONDS")


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's, ``odd_module``, of some text."""

    def write(text):
        (tmp_path / "odd_module.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "odd_module", raising=False)

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("totalSteps: 1\ntotalSteps: 2\n", "'totalSteps' is given twice"),
        ("model: {name: gpt, name: recurrent}\n", "'name' is given twice"),
        ("totalSteps: !!int ''\n", "To fix"),
        ("totalSteps: !!bool maybe\n", "To fix"),
        ("a: " + "[" * 1000, "To fix"),
    ],
)
def test_a_file_that_yaml_would_misread_is_refused(tmp_path, text, words):
    """A key that is given twice, too: PyYAML would take the last one, silently."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_config(tmp_path / "config.yaml", ())
    assert caught.value.field == "--config"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_file_is_read_as_yaml_says_not_as_the_machine_s_locale(tmp_path, monkeypatch, encoding):
    """Where the locale is another one, folders would get other names, silently."""
    monkeypatch.setattr("io.text_encoding", lambda given, *_: given or "latin-1")
    (tmp_path / "config.yaml").write_text("checkpoint: {path: /tmp/möbel}", encoding=encoding)
    assert read_config(tmp_path / "config.yaml", ()) == {"checkpoint": {"path": "/tmp/möbel"}}


def test_a_key_may_come_again_in_another_mapping_and_beside_what_is_merged(tmp_path):
    """YAML's ``<<`` takes over a mapping; a key beside it counts more."""
    (tmp_path / "config.yaml").write_text(
        "base: {inner: &inner {<<: &more {a: 1, b: 2}, a: 3}}\nother: {<<: *inner, b: 4}\n"
    )
    found = read_config(tmp_path / "config.yaml", ())
    assert found["other"] == {"a": 3, "b": 4}
    assert found["base"]["inner"] == {"a": 3, "b": 2}


@pytest.mark.slow
@pytest.mark.parametrize("value", ["!!timestamp 2020-99-99", "!!int ''", "[" * 1000])
def test_an_assignment_that_yaml_cannot_read_is_refused(tmp_path, value):
    (tmp_path / "config.yaml").write_text("totalSteps: 1\n")
    with pytest.raises(ConfigurationError, match=r"--set: 'totalSteps'.*To fix"):
        read_config(tmp_path / "config.yaml", (f"totalSteps={value}",))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("gpt", {"heads": 0}, "heads 0 is no whole number from 1 on"),
        ("gpt", {"dim": -8}, "dim -8"),
        ("gpt", {"dim": "32"}, "dim '32'"),
        ("gpt", {"context": 0}, "context 0"),
        ("gpt", {"context": 10**9}, "context 1000000000: the built-in text has samples of at most"),
        ("gpt", {"dropout": 7}, "dropout 7"),
        ("gpt", {"dropout": True}, "dropout True"),
        ("gpt", {"layers": 3.5}, "layers 3.5"),
        ("gpt", {"embedding_std": -0.1}, "embedding_std -0.1"),
        ("recurrent", {"dim": 0}, "dim 0"),
        ("autoencoder", {"dropout": 1.0}, "dropout 1.0"),
    ],
)
def test_arguments_that_make_no_model_are_refused(name, arguments, words):
    with pytest.raises(ConfigurationError, match="To fix") as caught:
        ValidatedJob.from_mapping({**PLAIN, "model": {"name": name, "args": arguments}})
    assert caught.value.field == "model.args"
    assert words in str(caught.value)


@pytest.mark.parametrize("failure", ["raise KeyError('size')", "assert False", "1 / 0", "{}[1]"])
def test_a_builder_and_data_that_fail_are_refused_with_the_line(own_module, failure):
    """A user's function may raise anything."""
    own_module(f"def build(**args):\n    {failure}\n")
    with pytest.raises(ConfigurationError, match=r"model.args: .*\(odd_module.py, line 2\).*To fix"):
        build_model(ModelConfig(name="odd_module:build"))
    with pytest.raises(ConfigurationError, match=r"data.args: .*\(odd_module.py, line 2\).*To fix"):
        data_source(DataConfig(name="odd_module:build"))


@pytest.mark.parametrize("text", ["import nothing_such", "x = 1 / 0", "def broken(:"])
def test_a_module_that_fails_as_it_is_imported_is_refused(own_module, text):
    """It is the module that is to be corrected, whatever names it."""
    own_module(text)
    with pytest.raises(ConfigurationError, match=r"cannot load 'odd_module:build'.*To fix"):
        load_callable("model.name", "odd_module:build")


def test_a_callable_may_be_an_attribute_of_a_class(own_module):
    """As the pattern of ``module:callable`` allows."""
    own_module("class Models:\n    @staticmethod\n    def build():\n        return 3\n")
    assert load_callable("model.name", "odd_module:Models.build")() == 3


def test_a_layer_that_cannot_be_built_is_refused_before_ranks_meet(own_module):
    """With its index; so is a function that gives no module."""
    own_module(
        """
        from torch import nn
        from ballast_trainer.models.protocol import Model

        def build(made):
            def layer(index):
                return nn.Linear(4, 4) if index < 2 else made()
            return Model(layer_count=4, build_layer=layer, loss=nn.functional.mse_loss, batch=lambda *_: 0)

        def failing():
            return build(lambda: nn.Linear(-1, 4))

        def text():
            return build(lambda: "layer")
        """
    )
    for name, field in (("failing", "model.args"), ("text", "model.name")):
        job = ValidatedJob.from_mapping({"totalSteps": 1, "model": {"name": f"odd_module:{name}"}})
        with pytest.raises(ConfigurationError, match=r"layer 2.*To fix") as caught:
            job.with_ties()
        assert caught.value.field == field


def test_a_model_of_more_layers_than_a_plan_can_name_is_refused(own_module):
    """Before rank 0 has built them."""
    own_module(
        """
        from ballast_trainer.models.protocol import Model

        def build():
            return Model(layer_count=10**6, build_layer=None, loss=None)
        """
    )
    with pytest.raises(ConfigurationError, match=r"has layer_count 1000000.*from 1 to 100000"):
        build_model(ModelConfig(name="odd_module:build"))


def test_what_is_pruned_does_not_come_back():
    """So a target below the initial sparsity would never be reached."""
    pruning = {"kind": "pruning", "target": 0.3, "pruning": {"initialSparsity": 0.5}}
    with pytest.raises(ConfigurationError, match="does not come back"):
        read_job_config({**PLAIN, "dynamics": [pruning]})
    read_job_config({**PLAIN, "dynamics": [{**pruning, "target": 0.5}]})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "freezing", "target": 0.1}, "less than one of 5 layers"),
        ({"kind": "freezing", "target": 0.9, "start_step": 20}, "startStep 20, and the job has 10 steps"),
        ({"kind": "freezing", "target": 0.3, "start_step": 8, "end_step": 50}, "less than one of 5 layers"),
        ({"kind": "pruning", "target": 0.0}, "target 0 prunes nothing"),
        ({"kind": "sparseAttention", "target": 0.4}, "dense above 0.5"),
        ({"kind": "earlyExit", "target": 0.0}, "stays 0"),
        ({"kind": "mixtureOfDepths", "target": 0.5, "start_step": 9, "end_step": 30}, "stays 0"),
    ],
)
def test_a_change_whose_settings_let_it_do_nothing_says_so(caplog, change, why):
    """It is no error: a shorter job, or a series of targets, may well have it."""
    warn_without_effect([DynamicConfig(**change)], 5, 10)
    assert f"dynamics: {change['kind']} changes nothing in this job: " in caplog.text
    assert why in caplog.text


def test_a_trace_of_steps_that_the_job_has_not_says_so(caplog):
    """And not one of its last step."""
    for first in (10, 11):
        config = {**PLAIN, "totalSteps": 10, "profiling": {"path": "/traces", "firstStep": first}}
        ValidatedJob.from_mapping(config).with_ties()
        told = "profiling traces nothing: firstStep 11, and the job has 10 steps" in caplog.text
        assert told is (first == 11)


def test_a_change_that_does_something_says_nothing(caplog):
    changes = [
        DynamicConfig(kind="freezing", target=0.5),
        DynamicConfig(kind="pruning", target=0.5),
        DynamicConfig(kind="sparseAttention", target=0.5),
        DynamicConfig(kind="earlyExit", target=0.5),
        DynamicConfig(kind="mixtureOfDepths", target=0.5),
        DynamicConfig(kind="mixtureOfExperts"),
    ]
    warn_without_effect(changes, 5, 10)
    assert caplog.text == ""


def test_the_reference_in_one_process_shares_its_experts_with_nobody():
    """What it is to be compared with has replicas."""
    experts = {"kind": "mixtureOfExperts", "experts": {"count": 4, "parallel": True}}
    config = {**PLAIN, "parallelism": {"data": 2}, "dynamics": [experts]}
    assert read_job_config(config).dynamics[0].experts.parallel
    alone = read_job_config(unpartitioned(config))
    assert alone.dynamics[0].experts.count == 4
    assert not alone.dynamics[0].experts.parallel
