"""Models, optimizers and data that users bring: one curve and one data order, whatever the ranks do."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.data.sources import ShuffledDataset
from ballast_trainer.errors import ConfigurationError, DataError, TrainerError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.loop.batches import compared, refuse_other_targets, targets_digest
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import _with_deferred_weights, build_model
from torch import nn

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.one_process import train_here
from tests.support.replans import has_acked, replan, stages_at, until

EXAMPLE = Path(__file__).parents[3] / "examples/trainer/hugging_face_decoder"
CPU = torch.device("cpu")


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """A module of the user's beside the configurations of all gangs of the test."""
    shutil.copy(Path(__file__).with_name("users_module.py"), tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def config(**fields):
        return {
            "totalSteps": 16,
            "model": {"name": "users_module:regression"},
            "data": {"name": "users_module:loader", "args": {"size": 8}},
            "pipeline": {"microbatches": 4, "globalBatchSize": 8},
            "training": {"optimizer": "users_module:CountingMomentum", "learningRate": 0.05},
            "rebalance": {"enabled": False},
            **fields,
        }

    return config


@pytest.fixture
def run(gang, tmp_path):
    """Start a gang whose configuration lies beside the user's module."""
    numbers = iter(range(100))

    def start(config, *, ranks, options=()):
        folder = tmp_path / f"gang-{next(numbers)}"
        folder.mkdir()
        shutil.copy(tmp_path / "users_module.py", folder)
        return gang(config, ranks=ranks, options=options, folder=folder)

    return start


@pytest.mark.processes
def test_each_step_sees_the_same_samples_whatever_ranks_replans_and_restarts(run, users_module, tmp_path):
    """What the ends of the pipeline ask for, in order, is what the step calls for: one rank, three, resumed.

    A rank between them reads only to try a partition, and workers read for their rank. The curve is that of
    one rank, with layers and an optimizer of the user's, which keeps a plain number in its state.
    """
    width = 8

    def config(name, **fields):
        (tmp_path / name).mkdir(exist_ok=True)
        args = {"notes": str(tmp_path / name)}
        return users_module(data={"name": "users_module:Recorded", "args": args}, **fields)

    saved = {"path": str(tmp_path / "saved"), "everySteps": 13}
    cuts = [(0, 4, 5, 6), (0, 1, 2, 6), (0, 2, 5, 6)]
    gates = Gates(tmp_path / "gates", 3, 7, 11)
    held = gates.hold_own(config("three", totalSteps=13, checkpoint=saved))
    running = run(held, ranks=3, options=["--channel", str(tmp_path / "channel")])
    for epoch, bounds in enumerate(cuts, start=2):
        change = {"epoch": epoch, "stages": stages_at(bounds, range(3))}
        replan(running, tmp_path, gates, lambda plan, change=change: plan.replace(**change))
        until(running, functools.partial(has_acked, tmp_path, epoch))
    single = run(config("one", totalSteps=20), ranks=1)
    for one in (running, single):
        one.succeeded()
    assert running.events("migrate")
    resumed = run(config("resumed", totalSteps=20, checkpoint=saved), ranks=2)
    resumed.succeeded()

    from users_module import Recorded

    dataset = ShuffledDataset(Recorded(tmp_path))
    expected = [dataset.indices(0, step, width) for step in range(20)]
    for name, ranks, steps in (("three", 3, range(13)), ("one", 1, range(20)), ("resumed", 2, range(13, 20))):
        read = []
        for log in sorted((tmp_path / name).glob("*.log")):
            order = [int(line) for line in log.read_text().split()]
            batches = [order[at : at + width] for at in range(0, len(order), width)]
            # A pipeline that is built or rebuilt looks at its next batch once more.
            read.append(
                [batch for batch, before in zip(batches, [None, *batches], strict=False) if batch != before]
            )
        assert len(read) == ranks
        wanted = [expected[step] for step in steps]
        between = [batches for batches in read if batches != wanted]
        assert len(read) - len(between) == min(ranks, 2)
        assert all(len(batches) <= 1 + len(cuts) and batches[0] == wanted[0] for batches in between)
        assert all(batch in wanted for batches in between for batch in batches)
    assert_same_curve({**running.losses(), **resumed.losses()}, single.losses())
    assert single.losses()[20] < single.losses()[1]


@pytest.mark.processes
def test_workers_read_what_the_training_process_would(run, users_module, tmp_path):
    """Each step's samples by processes of their own; the curve is the same, also after a restart."""
    logs = tmp_path / "logs"
    logs.mkdir()
    data = {"name": "users_module:Recorded", "args": {"notes": str(logs)}}
    single = run(users_module(data=data, totalSteps=8), ranks=1)
    single.succeeded()
    plain = sorted(logs.glob("*.log"))
    saved = {"path": str(tmp_path / "saved"), "everySteps": 5}
    training = {**users_module()["training"], "dataloaderNumWorkers": 2}
    losses = {}
    for steps in (5, 8):
        config = users_module(data=data, totalSteps=steps, checkpoint=saved, training=training)
        ahead = run(config, ranks=2)
        ahead.succeeded()
        losses |= ahead.losses()
    assert_same_curve(losses, single.losses())
    # Two workers on each of two ranks, in each of two runs; no rank has read anything itself.
    assert len(set(logs.glob("*.log")) - set(plain)) == 8


UNEQUAL = {"name": "users_module:unequal", "args": {"samples": 400, "fewer": 50}}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fields", "words"),
    first_daily(
        [
            ({"data": UNEQUAL}, "data.name: the ranks .* the batch of step 1,"),
            (
                {"evaluation": {"everySteps": 1, "data": UNEQUAL}},
                "evaluation.data.name: the ranks have 43 to 50 batches",
            ),
            ({"data": UNEQUAL, "parallelism": {"data": 2}}, "data.name: the ranks .* the batch of step 1,"),
            (
                {"data": UNEQUAL, "pipeline": {"schedule": "PipeDream2BW"}},
                "data.name: .* the batch of step 1,",
            ),
        ],
        2,
    ),
)
def test_ranks_that_read_other_targets_are_refused_and_not_trained_on_mixed_samples(
    run, users_module, fields, words
):
    """One rank uses the inputs that it has read, another its targets."""
    pipeline = users_module()["pipeline"] | fields.get("pipeline", {})
    running = run(users_module(**fields | {"pipeline": pipeline}), ranks=2)
    assert 0 not in running.exit_codes().values() and not running.losses().keys() - {1}
    assert re.search(rf"{words}.*To fix: ", running.errors())


def test_targets_that_differ_by_rounding_are_the_same_and_others_are_not():
    """Ranks' CPUs may round apart; a rank that reads none has no say."""
    numbers = torch.rand(8, 1000, generator=torch.Generator().manual_seed(2))
    tokens = (numbers * 50).long()

    def refused(*targets):
        rows = [compared(None), *(compared(targets_digest(one)) for one in targets)]
        try:
            refuse_other_targets([sum(column) for column in zip(*rows, strict=True)], field="f", what="w")
        except DataError:
            return True
        return False

    assert not refused() and not refused(tokens) and not refused(*[tokens] * 1000)
    assert not refused(numbers, numbers * (1 + 1e-6), numbers)
    assert refused(tokens, tokens.flip(0)) and refused(numbers, numbers.flip(0), numbers)
    assert refused(tokens > 9, tokens > 10)
    assert not refused(torch.zeros(0), torch.zeros(0))


def test_optimizer_state_that_cannot_travel_is_refused_with_the_reason(users_module, tmp_path):
    """An optimizer that counts in its parameter groups would lose the count with the layer."""
    config = users_module(checkpoint={"path": str(tmp_path / "saved"), "everySteps": 2})
    config["training"]["optimizer"] = "users_module:CountingInGroups"
    with pytest.raises(TrainerError, match="keeps rounds in its parameter groups"):
        train_here(config)


@pytest.mark.processes
def test_the_hugging_face_example_partitioned_learns_as_in_one_process(gang, tmp_path):
    """The decoder's layers over three ranks: the losses of the whole model in one process."""
    config = read_config(EXAMPLE / "decoder.yaml", ("totalSteps=8", "training.precision=fp32"))
    config["model"]["args"]["num_hidden_layers"] = 4
    runs = []
    for ranks, options in ((3, ()), (1, ("--single-process",))):
        folder = tmp_path / f"ranks-{ranks}"
        shutil.copytree(EXAMPLE, folder)
        runs.append(gang(config, ranks=ranks, options=options, folder=folder))
    for one in runs:
        one.succeeded()
    assert_same_curve(runs[0].losses(), runs[1].losses())
    assert runs[1].losses()[8] < runs[1].losses()[1] - 0.5


def test_the_hugging_face_example_taken_apart_is_the_model_itself(monkeypatch):
    """The layers one after the other give the logits of the whole module."""
    monkeypatch.syspath_prepend(EXAMPLE)
    from decoder import decoder
    from small_decoder import SmallForCausalLM

    whole = SmallForCausalLM(num_hidden_layers=3)
    model = decoder(whole)
    tokens = torch.randint(0, 256, (2, 12))
    value = tokens
    for index in range(model.layer_count):
        value = model.build_layer(index)(value)
    torch.testing.assert_close(value, whole(tokens))
    assert model.tied == ()
    tied = decoder(SmallForCausalLM(num_hidden_layers=3, tie_word_embeddings=True))
    assert tied.tied == (((0, "model.model.embed_tokens.weight"), (4, "model.lm_head.weight")),)


class Scaled(nn.Module):
    """A loss over its own running mean, or over a constant."""

    def __init__(self, constant):
        super().__init__()
        self.constant = constant
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        loss = nn.functional.mse_loss(output, target)
        if not self.constant:
            self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


def scaled(*, constant):
    return Model.from_layers([nn.Linear(16, 1)], loss=Scaled(constant))


@pytest.mark.parametrize("constant", [False, True])
def test_a_loss_that_changes_its_buffers_is_told(users_module, caplog, constant):
    """They would be lost with the rank of the last stage, and with each restart."""
    train_here(
        users_module(totalSteps=3, model={"name": f"{__name__}:scaled", "args": {"constant": constant}})
    )
    told = "the loss (Scaled) changes mean as it runs, which neither moves nor is saved"
    assert caplog.text.count(told) == (not constant)


@pytest.mark.parametrize("width", [2, 256], ids=["in memory", "deferred"])
def test_a_copy_of_a_module_has_the_hooks_and_attributes_of_its_parameters(width):
    """Torch's copies are without them: gradients would not be scaled, groups by attributes be others."""

    def build():
        layer = nn.Linear(width, width)
        layer.weight.no_decay = True
        layer.weight.register_hook(lambda gradient: gradient * 2)
        layer.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", None))
        layer.register_parameter("frozen", nn.Parameter(torch.ones(2)))
        layer.frozen.register_hook(lambda gradient: gradient)
        layer.frozen.requires_grad_(False)
        return Model.from_layers([layer], loss=nn.functional.mse_loss)

    trained = _with_deferred_weights("build", build, 0).build_layer(0)
    trained(torch.ones(3, width)).sum().backward()
    assert trained.weight.no_decay
    assert torch.equal(trained.weight.grad, torch.full((width, width), 6.0))
    assert trained.bias.grad is None


def test_a_hook_of_a_parameter_that_is_not_trained_is_refused():
    """It would go on reading the first weights."""
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient + 0.1 * layer.bias + 0.1 * weight)
    weight = layer.weight
    model = Model.from_layers([layer], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=r"a hook of 'weight' of layer 0 refers.*To fix: "):
        model.build_layer(0)


def test_a_hook_with_a_variable_that_has_no_value_is_refused_in_words():
    """Python's own words would be that a cell is empty."""
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient * factor)
    model = Model.from_layers([layer], loss=nn.functional.mse_loss)
    with pytest.raises(
        ConfigurationError, match=r"a hook of 'weight' of layer 0.* factor, .*no value.*To fix: "
    ):
        model.build_layer(0)
    factor = 2
    assert model.build_layer(0).weight._backward_hooks


class Counted(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = 0

    def forward(self, value):
        self.seen += 1
        return super().forward(value)


def counted():
    return Model.from_layers([Counted(16, 1)], loss=nn.functional.mse_loss)


def test_a_layer_that_counts_in_an_attribute_is_told_on_one_rank(users_module, caplog):
    """Its count is not in a checkpoint, and after a restart its loss is another one."""
    train_here(users_module(totalSteps=3, model={"name": f"{__name__}:counted"}))
    assert caplog.text.count("Counted.seen changes in a forward, and neither moves") == 1


def test_modules_given_as_a_list_can_be_built_again_as_they_were():
    """A layer that has been trained and left comes back from its first weights, not from the trained ones."""
    first = nn.Linear(2, 2)
    model = Model.from_layers([first, lambda: nn.Linear(2, 1)], loss=nn.functional.mse_loss)
    built = model.build_layer(0)
    with torch.no_grad():
        built.weight.add_(1)
    assert torch.equal(model.build_layer(0).weight, first.weight)
    assert model.build_layer(1).out_features == 1


def test_a_builder_starts_every_rank_with_the_same_weights(users_module):
    """Torch is seeded before the builder runs; its generator is left as it was."""
    built = []
    for draws in (0, 5):
        torch.rand(draws)
        state = torch.get_rng_state()
        model = build_model(
            ModelConfig(name="users_module:regression"),
            DataConfig(name="users_module:loader", args={"size": 8}),
            seed=4,
        )
        assert torch.equal(state, torch.get_rng_state())
        built.append(model.build_layer(0)[0].weight)
    assert torch.equal(*built)


def test_a_model_without_data_asks_for_some(users_module):
    """The configuration's ``data`` is the place."""
    with pytest.raises(ConfigurationError, match="brings no data of its own") as caught:
        build_model(ModelConfig(name="users_module:regression"))
    assert caught.value.field == "data.name"
    with pytest.raises(ConfigurationError, match="do not fit") as caught:
        build_model(
            ModelConfig(name="users_module:regression"), DataConfig(name="users_module:loader", args={"s": 1})
        )
    assert caught.value.field == "data.args"


def test_an_optimizers_numbers_travel_with_the_layer(users_module):
    """A step count kept as a plain number, and one that is true or false."""
    from users_module import CountingMomentum

    model = Model.from_layers([nn.Linear(2, 2)], loss=nn.functional.mse_loss)
    config = TrainingConfig(optimizer="users_module:CountingMomentum")
    layers = LayerSet(model, config, CPU, lambda index, module: module)
    layer, other = layers.make(0), layers.make(0)
    assert isinstance(layer.optimizer, CountingMomentum)
    for parameter in layer.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer.optimizer.step()
    state = layer.optimizer.state[layer.module.weight]
    state.update({"warm": True, "beta": 0.1, "nothing": None})
    other.load(layer.state())
    arrived = other.optimizer.state[other.module.weight]
    assert (arrived["count"], arrived["warm"], arrived["beta"]) == (1, True, 0.1)
    assert isinstance(arrived["warm"], bool)
    assert torch.equal(arrived["momentum"], state["momentum"])
    state["history"] = [1, 2]
    with pytest.raises(TrainerError, match="keeps 'history' as list"):
        layer.state()


@pytest.mark.processes
def test_the_example_in_the_documentation_runs_as_it_is_printed(gang, tmp_path):
    """Both files of the page, copied: three ranks learn what one process learns."""
    page = (Path(__file__).parents[3] / "docs/trainer-models.md").read_text()
    module, text = re.search(r"```python\n(.*?)```.*?```yaml\n(.*?)```", page, re.DOTALL).groups()
    config = yaml.safe_load(text)
    assert config["model"]["name"] == "my_model:build"
    runs = []
    for ranks, options in ((3, ()), (1, ("--single-process",))):
        folder = tmp_path / f"ranks-{ranks}"
        folder.mkdir()
        (folder / "my_model.py").write_text(module)
        runs.append(gang(config, ranks=ranks, options=options, folder=folder))
    for one in runs:
        one.succeeded()
    assert_same_curve(runs[0].losses(), runs[1].losses())
    assert runs[1].losses()[20] < runs[1].losses()[1]


def test_a_loss_with_parameters_needs_a_layer_that_is_given():
    """No optimizer would have them beside functions alone; frozen ones, and none, are fine."""

    class Scaled(nn.Module):
        def __init__(self, trained):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

        def forward(self, output, target):
            return self.scale * nn.functional.mse_loss(output, target)

    layers = [nn.Linear(2, 2)]
    with pytest.raises(ValueError, match=r"Scaled has parameters, and only layers are trained.*from_layers"):
        Model(layer_count=1, build_layer=layers.__getitem__, loss=Scaled(True))
    for loss in (Scaled(False), nn.CrossEntropyLoss()):
        assert list(dict(Model.from_layers(layers, loss=loss).build_layer(0).named_parameters())) == [
            "weight",
            "bias",
        ]
