"""A tensor group with a rank that is late: found, and relieved; the lateness is emulated."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from ballast_policies.contract.job.pipeline import Imputation, Selection, StragglerPolicy, StragglersConfig
from ballast_trainer.data.corpus import text_batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.gpu_emulation import emulated_speed
from ballast_trainer.models.gpt import Block
from ballast_trainer.tensor_parallel import straggler_mitigation
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.parallel_pair import pairs
from ballast_trainer.tensor_parallel.product import GemmTimer
from ballast_trainer.tensor_parallel.straggler_mitigation import ColumnImportance, StragglerMitigation

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.one_process import train_here
from tests.support.ports import free_port
from tests.trainer.models import families

SLOW_RANK, SLOW = 1, 8.0


def short(config, family):
    # Of much smaller products, what it takes to relieve a rank is more than what is won.
    config["pipeline"] = {"microbatches": 2, "globalBatchSize": 8}
    if family == "gpt":
        config["model"] = {"name": "gpt", "layers": 4, "args": {"dim": 192, "heads": 8, "context": 64}}
        return config
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "head_dim": 24, "vocab_size": 256}
    arguments = families.arguments(family) | sizes
    config["model"] = {"name": "ballast_trainer.models.hugging_face:from_config", "args": arguments}
    config["data"] = {"name": "tests.trainer.tensor_parallel.test_stragglers:text"}
    return config


def text():
    return functools.partial(text_batch, context=64)


def with_stragglers(config, **stragglers):
    config["parallelism"] = {"tensor": 2, "stragglers": {"tolerance": 0.5, **stragglers}}
    return config


@pytest.fixture
def late_group(pods):
    """Starts two ranks, of which the second takes eight times as long (emulated by sleeping)."""

    def start(config):
        path = pods.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        port = free_port()
        for rank in range(2):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "BALLAST_EMULATED_SLOWDOWN": json.dumps({"default": SLOW if rank == SLOW_RANK else 1.0}),
            }
            pods.start(f"rank-{rank}", ["run", "--config", str(path), "--log", "json"], environment)
        pods.succeeded()
        return pods

    return start


@pytest.mark.processes
@pytest.mark.parametrize("family", first_daily(["llama", "gpt"]))
def test_a_late_rank_is_found_and_its_work_moves_without_loss(late_group, small_config, tmp_path, family):
    """Policy migrate: the slow rank hands over most of its work; curve and weights are one process's."""
    config, files = short(small_config(totalSteps=10), family), {}
    for name in ("alone", "cut"):
        files[name] = tmp_path / f"{name}.pt"
        config["checkpoint"] = {"path": str(tmp_path / name), "everySteps": 10}
        config["export"] = {"path": str(files[name]), "format": "torch"}
        if name == "alone":
            expected = train_here(config).losses
    running = late_group(with_stragglers(config, policy="migrate"))
    found = running.events("workload")[0]
    assert found["late"] == [SLOW_RANK]
    assert found["migrated"][SLOW_RANK] > 0.5
    assert found["migrated"][0] == 0 == max(found["left_out"])
    assert_same_curve(running.losses(), expected)
    weights, whole = torch.load(files["cut"]), torch.load(files["alone"])
    assert weights.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize("family", first_daily(["llama", "gpt"]))
def test_a_late_rank_leaves_columns_out(late_group, small_config, single_process_losses, family):
    """Policy resize: only the late rank's products get smaller; the loss is another one, and still falls."""
    config = short(small_config(totalSteps=10), family)
    expected = single_process_losses(config)
    running = late_group(with_stragglers(config, policy="resize", epochSteps=3))
    found = running.events("workload")[0]
    assert found["left_out"][SLOW_RANK] > 0.3
    assert found["left_out"][0] == 0 == max(found["migrated"])
    losses = running.losses()
    before = found["step"]
    assert all(abs(losses[step] - expected[step]) < 1e-5 for step in range(1, before))
    assert abs(losses[10] - expected[10]) > 1e-4
    assert losses[10] < losses[1] - 0.2


@pytest.mark.processes
@pytest.mark.nightly
def test_semi_relieves_a_late_rank_of_a_model_of_transformers(late_group, small_config, tmp_path):
    """Policy semi: units are handed over, and columns left out where that is cheaper; whose is an event.

    Without columns left out the curve is one process's.  With them it falls by at least half as much.
    """
    config = short(small_config(totalSteps=10), "llama")
    expected = train_here(config).losses
    running = late_group(with_stragglers(config, policy="semi", epochSteps=3))
    decided, losses = running.events("workload"), running.losses()
    assert decided[0]["late"] == [SLOW_RANK]
    assert decided[0]["migrated"][SLOW_RANK] + decided[0]["left_out"][SLOW_RANK] > 0.3
    assert all(event["migrated"][0] == 0 == event["left_out"][0] for event in decided)
    assert all(abs(losses[step] - expected[step]) < 1e-5 for step in range(1, decided[0]["step"]))
    if any(event["left_out"][SLOW_RANK] for event in decided):
        assert losses[1] - losses[10] > (expected[1] - expected[10]) / 2
    else:
        assert_same_curve(losses, expected)


def importance(**config):
    torch.manual_seed(0)
    block = split_layer(Block(32, 8, 0.0), Axis(ranks=(0, 1)))
    up = block.get_submodule("mlp").up
    return ColumnImportance(up, StragglersConfig(policy=StragglerPolicy.RESIZE, **config), seed=1), up.weight


def change(weight, columns, by=0.1):
    with torch.no_grad():
        weight[:, columns] += by


def test_columns_that_change_least_are_left_out():
    """Priority selection: after an epoch in which half of the columns moved, the others go first."""
    chosen, weight = importance()
    chosen.end_epoch()
    change(weight, slice(0, 16))
    chosen.end_epoch()
    assert list(chosen.choose(0.5, 32)) == list(range(16))


def test_what_was_left_out_keeps_its_figure_and_comes_back():
    """Columns left out do not count as unchanged; once the others settle they are computed again."""
    chosen, weight = importance()
    chosen.end_epoch()
    change(weight, slice(0, 16), by=0.2)
    change(weight, slice(16, 32), by=0.1)
    chosen.end_epoch()
    assert list(chosen.choose(0.5, 32)) == list(range(16))
    change(weight, slice(0, 16), by=0.01)
    chosen.end_epoch()
    assert list(chosen.choose(0.5, 32)) == list(range(16, 32))


def test_random_selection_differs_from_epoch_to_epoch():
    """Of the asked number, ascending, without looking at the weights."""
    chosen, _ = importance(selection=Selection.RANDOM)
    first, second = chosen.choose(0.5, 32), chosen.choose(0.5, 32)
    assert len(first) == len(second) == 16
    assert list(first) == sorted(first) and list(first) != list(second)


def test_a_layer_that_is_settled_leaves_out_more():
    """Differentiated ratio: few columns above the threshold raise gamma, many lower it to 0.8 of itself."""
    chosen, weight = importance(differentiated=True, epoch_steps=10)
    chosen.end_epoch()
    change(weight, slice(0, 8), by=0.5)
    chosen.end_epoch()
    assert len(chosen.choose(0.5, 32)) == 8
    change(weight, slice(0, 32), by=0.5)
    chosen.keep_all()
    chosen.end_epoch()
    assert len(chosen.choose(0.5, 32)) == 20


class TwoRanks(Axis):
    """A tensor group whose other rank always takes 1 s a step, half of it in products."""

    def all_reduce(self, tensor, *, largest=False):
        """Nothing comes from the other rank."""
        return tensor

    def gather_values(self, values, device):
        """What this rank says, and what the other one always says; costs are alike."""
        if len(values) > 3:
            costs.append(values)
            return [values, values]
        exchanges.append(values)
        return [values, [1.0, 0.5, values[2]]]

    def broadcast(self, tensor, source):
        """Nothing comes from the other rank."""
        return tensor


exchanges, costs = [], []
passed = [0.0]
"""Seconds of the clock that steps are compared by."""


def steps(seconds, held=lambda step: 1, least=0.0, **stragglers):
    """The mitigation, its layers and whether it wanted an exchange before, after each step of this rank.

    Args:
        seconds: of each step.
        held: how many layers there are in it.
        least: seconds that pass in a step, however few this rank takes.
        stragglers: what is done about late ranks, beyond leaving columns out.
    """
    exchanges.clear()
    costs.clear()
    torch.manual_seed(0)
    axis = TwoRanks(ranks=(0, 1))
    layers = [SimpleNamespace(index=at, module=split_layer(Block(32, 8, 0.0), axis)) for at in (0, 1)]
    stragglers = {"epoch_steps": 100, **stragglers}
    config = StragglersConfig(policy=StragglerPolicy.RESIZE, **stragglers)
    mitigation = StragglerMitigation(config, torch.device("cpu"), None, seed=0)
    for step, taken in enumerate(seconds):
        now = layers[: held(step)]
        exchange = mitigation.wants_exchange
        mitigation.begin_step(step, now, axis, microbatches=1, exchange=exchange)
        yield mitigation, now
        for layer in now:
            layer.module(torch.randn(2, 4, 32, requires_grad=True)).sum().backward()
        passed[0] += max(taken, least)
        mitigation.finish_step(taken)


def test_times_are_exchanged_only_where_a_ranks_own_have_changed_by_a_tenth():
    """After the first decision: not for 5 % more, but for 20 %; and no rank is late within the tolerance."""
    asked, late = [], []
    for mitigation, _ in steps([1.0] * 3 + [1.02] * 4 + [1.07] * 4 + [1.3] * 3 + [1.3] * 4):
        asked.append(len(exchanges))
        late.append(None if mitigation.decision is None else mitigation.decision.stragglers)
    assert asked[:4] == [0, 0, 0, 1], "the first decision comes after three measured steps"
    assert (asked[10], asked[-1]) == (1, 2)
    assert exchanges[0][0] == 1.0
    assert late[3] == late[10] == ()
    assert late[-1] == (0,)


@pytest.fixture
def ticking(monkeypatch):
    """Every look at the clock of products takes a tenth of a second; a step waits for the late rank alone."""
    clock = itertools.count()
    monkeypatch.setattr(straggler_mitigation, "step_clock", lambda: passed[0])
    monkeypatch.setattr(GemmTimer, "now", lambda self: next(clock) / 10)


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("after", "least", "acts"), [(1.6, 0, True), (2.0, 0, False), (1.6, 2, False)])
def test_a_decision_after_which_steps_are_no_shorter_is_taken_back(after, least, acts):
    """Three steps later, whatever the late rank itself wins; and tried again only of ranks late otherwise."""
    taken = [2.0] * 3 + [after] * 3 + [after if acts else 2.0] * 12 + [3.0] * 4
    acted = [
        mitigation.decision is not None and mitigation.decision.acts
        for mitigation, _ in steps(taken, least=least)
    ]
    assert acted[3:6] == [True] * 3
    assert acted[6:18] == [acts] * 12
    assert acted[-1], "a rank that is late otherwise is decided on again"


@pytest.mark.usefixtures("ticking")
def test_a_layer_that_arrives_is_resized_at_once_and_the_decision_is_made_again():
    """Not at the next epoch; seconds of before the move do not tell whether the decision has helped."""
    acted, resized = [], []
    # The late rank's step is a second longer with the second layer, whatever is left out.
    for mitigation, held in steps([2.0] * 3 + [1.6] * 2 + [3.0] * 6, held=lambda step: 1 + (step >= 5)):
        acted.append(mitigation.decision is not None and mitigation.decision.acts)
        resized.append(
            [all(one.selection for pair in pairs([layer.module]) for one in pair.linears) for layer in held]
        )
    assert resized[3:6] == [[True], [True], [True, True]]
    assert all(acted[3:]), "three seconds with two layers are no sign that it was in vain"
    assert len(exchanges) == 2 and mitigation.wants_exchange, "the decision about both layers is judged, too"
    assert costs[1][0] > 1.5 * costs[0][0], "two layers cost twice as much to resize"


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("imputation", [Imputation.ZERO, Imputation.SAME])
def test_a_column_left_out_from_now_on_has_the_gradient_of_the_step_before(imputation):
    """With ``same``, when columns are chosen again; with ``zero`` it has none."""
    chosen = {"epoch_steps": 5, "selection": Selection.RANDOM, "imputation": imputation}
    kept, gradients = [], []
    for _, (layer,) in steps([2.0] * 3 + [1.6] * 3, **chosen):
        inner = pairs([layer.module])[0].linears[0]
        if inner.weight.grad is not None:
            gradients.append(inner.weight.grad.clone())
        inner.weight.grad = None
        if inner.selection:
            kept.append(set(inner.selection.kept.tolist()))
        last = inner.weight
    gradients.append(last.grad)
    left_out_now = sorted(kept[-2] - kept[-1])
    assert left_out_now, "other columns are chosen"
    before, after = (gradient[:, left_out_now] for gradient in gradients[-2:])
    torch.testing.assert_close(after, before if imputation is Imputation.SAME else torch.zeros_like(after))


@pytest.mark.usefixtures("ticking")
def test_all_columns_are_computed_between_steps_and_the_next_one_leaves_out_those_of_before():
    """Whoever runs a layer there sees it whole: an evaluation, or a look at its plasticity."""
    chosen = []
    for _, (layer,) in steps([2.0] * 3 + [1.6] * 2):
        (pair, *_) = pairs([layer.module])
        chosen.append([one.selection for one in pair.linears])
    assert all(chosen[-1]) and chosen[-1] == chosen[-2]
    assert [one.selection for one in pair.linears] == [None, None]


def test_an_emulated_straggler_is_slow_in_its_products_alone():
    """Its variable counts on top of the slow-down of the whole device; nonsense is refused."""
    environment = {"BALLAST_EMULATED_SLOWDOWN": '{"default": 2}', "BALLAST_EMULATED_STRAGGLER": "8"}
    speed = emulated_speed(environment, "transformer")
    assert (speed.factor, speed.of_products().factor) == (2.0, 16.0)
    assert emulated_speed({"BALLAST_EMULATED_STRAGGLER": "4"}, "transformer").factor == 1.0
    assert emulated_speed({}, "transformer") is None
    for nonsense in ("slow", "0.5"):
        with pytest.raises(ConfigurationError, match="BALLAST_EMULATED_STRAGGLER"):
            emulated_speed({"BALLAST_EMULATED_STRAGGLER": nonsense}, "transformer")
