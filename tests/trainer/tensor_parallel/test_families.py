"""Families of transformers over a tensor group, cut by their own plans: the curve is that of one process."""

import pytest
import torch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.seeding import host_seeded
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.parallel_pair import pairs
from ballast_trainer.tensor_parallel.product import IMPUTATIONS, ColumnSelection

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.one_process import train_here
from tests.support.replans import replan, stages_at
from tests.trainer.models import families
from tests.trainer.models.test_hugging_face_families import batch_of, job
from tests.trainer.tensor_parallel.ranks import on_ranks

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")


def assert_refused(config, field, words):
    """Before any rank starts, with what is wrong and what to change; returns the text."""
    with pytest.raises(ConfigurationError, match=rf"{words}.*To fix") as caught:
        ValidatedJob.from_mapping(config)
    assert caught.value.field == field
    return str(caught.value)


class Alone(Axis):
    """A tensor group from whose other rank nothing comes."""

    def all_reduce(self, tensor, *, largest=False):
        """Nothing is added."""
        return tensor


class Doubled(Axis):
    """A tensor group whose other rank computes the same."""

    def all_reduce(self, tensor, *, largest=False):
        """What this rank has, twice."""
        return tensor.mul_(2)


MIXTURE, GPT_OSS, OLMOE = (f"{name} with its routers' loss" for name in ("mixtral", "gpt_oss", "olmoe"))
LITTLE_CUT = ("bert", "vit", "dinov2", "recurrent_gemma", "diffllama")
"""Families of whose layers, as small as here, more than a third is in parts that stay whole."""


def curves(world, names):
    """Five steps of each family on a tensor group, and of the whole model; bytes of parameters of both."""
    from ballast_trainer.models.hugging_face import from_config

    found = {}
    for name in names:
        with host_seeded(0):
            model = from_config(**families.arguments(name))
        for cut in (True, False):
            layers = [model.build_layer(index) for index in range(model.layer_count)]
            layers = [split_layer(layer, world.tensor) for layer in layers] if cut else layers
            parameters = {id(one): one for layer in layers for one in layer.parameters()}
            optimizer, losses = torch.optim.SGD(parameters.values(), lr=0.1), []
            for step in range(5):
                value, targets = batch_of(name)(0, step, 4)
                for layer in layers:
                    value = layer(value)
                loss = model.loss(value, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            found[name, cut] = losses, sum(one.nbytes for layer in layers[1:-1] for one in layer.parameters())
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    first_daily(
        [
            ["qwen3", "phi3", MIXTURE, "falcon with alibi"],
            ["mistral", "gpt_neox", "bloom"],
            ["gemma2", "deepseek_v3", "gptj"],
            ["gpt2", "gpt_bigcode", "bert", "vit"],
            ["mamba", "mamba2", "mamba2 with heads in groups", "llama4_text", GPT_OSS],
            ["bitnet", OLMOE, "olmo2 with one head of keys"],
            ["phimoe", "granitemoe with its routers' loss", "jamba", "glm4", "nemotron_h"],
            ["deepseek_v2", "longcat_flash", "dinov2", "lfm2", "recurrent_gemma", "diffllama"],
        ],
        6,
    ),
    ids=" ".join,
)
def test_families_that_are_cut_learn_as_in_one_process(names):
    """To a few of the last digits of a loss of 4, on each of two ranks, as its rows in another order would.

    A layer's parameters take little more than half of the memory there.

    Grouped queries, norms of heads, gathered columns, experts; fused matrices, latent heads, MLPs alone,
    transposed weights, encoders; state spaces, norms of all heads, sinks, biases of experts.
    """
    for found in on_ranks(curves, 2, names):
        for name in names:
            (losses, part), (expected, whole) = found[name, True], found[name, False]
            assert_same_curve(dict(enumerate(losses)), dict(enumerate(expected)), within=3e-6)
            assert part < (0.85 if name in LITTLE_CUT else 0.7) * whole, name


def test_an_encoder_of_one_length_is_tried_with_it():
    """Whisper's takes as many positions as it has, alone; its MLPs are cut, as its decoder's."""
    pipeline = {"microbatches": 2, "globalBatchSize": 4}
    ValidatedJob.from_mapping(job("whisper", pipeline=pipeline, parallelism={"tensor": 2}))


def test_a_plan_may_state_how_embeddings_are_cut(monkeypatch):
    """As families of transformers 5.24 do: those are no part of a layer, and stay whole."""
    from ballast_trainer.models.hugging_face import from_config
    from transformers import LlamaConfig

    stated = {**LlamaConfig.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", stated)
    model = from_config(**families.arguments("llama"))
    layer = split_layer(model.build_layer(1), Alone(ranks=(0, 1)))
    assert len(pairs([layer])) == 2


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    first_daily([MIXTURE, "mamba2", GPT_OSS, "gpt2", "qwen3", "gpt_neox", "phi3", "gemma2", "mamba"], 2),
)
def test_layers_that_are_cut_move_and_continue_whole_from_a_checkpoint(gang, tmp_path, name):
    """Pipeline 2 x tensor 2, a move, then one process: the curve, and the exported weights, of one process.

    Embeddings are tied, and figures of routers travel between stages.  The forwards of the layers whose
    parameters stand as others while they run are repeated.
    """
    config = job(name, totalSteps=6, pipeline={"microbatches": 2, "globalBatchSize": 4})
    config["model"]["args"] |= {"tie_word_embeddings": True}
    config["export"] = {"path": str(tmp_path / "alone.safetensors"), "format": "safetensors"}
    config["checkpoint"] = {"path": str(tmp_path / "alone"), "everySteps": 6}
    expected = train_here(config)
    config["checkpoint"] = {"path": str(tmp_path / "saved"), "everySteps": 4}
    config["export"]["path"] = str(tmp_path / "cut.safetensors")
    config["training"]["recompute"] = name in ("mamba2", GPT_OSS)
    gates = Gates(tmp_path / "gates", 2)
    held = gates.hold_own({**config, "totalSteps": 4, "parallelism": {"tensor": 2}})
    running = gang(held, ranks=4, options=["--channel", str(tmp_path / "channel")])
    moved = stages_at((0, 1, 5), range(2))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    running.succeeded()
    assert running.events("migrate")
    after = train_here(config)
    assert_same_curve(running.losses() | after.losses, expected.losses)
    from safetensors.torch import load_file

    found, wanted = (load_file(tmp_path / f"{kind}.safetensors") for kind in ("cut", "alone"))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"hidden_act": "relu", "intermediate_size": 49}, r"\(49, 32\) does not divide by 1 x 2"),
        ("mamba", {"model_type": "rwkv"}, r"no plan .*base_model_tp_plan.* of RwkvBlock"),
        ("mamba2", {"hidden_size": 36, "num_heads": 9}, r"9 heads \(num_heads\) do not divide over 2"),
        (
            "mamba2",
            {"hidden_size": 48, "num_heads": 12, "n_groups": 3},
            r"3 groups \(n_groups\) do not divide",
        ),
        ("llama", {"num_key_value_heads": 1}, r"1 heads \(num_key_value_heads\) do not divide over 2"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout 0\.1 would be drawn otherwise"),
    ],
)
def test_a_family_that_cannot_be_cut_is_refused_by_name(name, change, words):
    """Whatever does not divide, has no plan, or would be drawn otherwise."""
    config = job(name, parallelism={"tensor": 2})
    config["model"]["args"] |= change
    assert_refused(config, "parallelism.tensor", words)


@pytest.mark.parametrize(("name", "policy"), [("mamba2", "resize"), ("mamba", "migrate")])
def test_a_policy_for_stragglers_of_layers_without_pairs_is_refused_by_name(name, policy):
    """It would do nothing: between the products of a state space are parameters that are not handed over."""
    config = job(name, parallelism={"tensor": 2, "stragglers": {"policy": policy}})
    assert_refused(config, "parallelism.stragglers.policy", r"Mamba2?Block .*without pairs of products")


def test_units_of_a_layer_that_insists_on_their_number_are_not_handed_over(monkeypatch):
    """Refused by name before any rank starts; columns may be left out."""
    from transformers.models.llama import modeling_llama

    def forward(self, value):
        between = self.act_fn(self.gate_proj(value)) * self.up_proj(value)
        return self.down_proj(between.view(*value.shape[:-1], len(self.gate_proj.weight)))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    config = job("llama", parallelism={"tensor": 2, "stragglers": {"policy": "semi"}})
    text = assert_refused(
        config, "parallelism.stragglers.policy", "LlamaDecoderLayer, with units handed over"
    )
    assert "resize" in text
    config["parallelism"]["stragglers"]["policy"] = "resize"
    ValidatedJob.from_mapping(config)


@pytest.mark.parametrize("imputation", IMPUTATIONS)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "glm4", "gpt2", "bert"])
def test_products_of_a_family_leave_out_columns_and_impute_their_gradients(name, imputation):
    """Y = X[:, K] W[:, K]^T and dW[:, K] = dY^T X[:, K] (section III-A); what is left out is imputed."""
    from ballast_trainer.models.hugging_face import from_config

    with host_seeded(0):
        layer = from_config(**families.arguments(name)).build_layer(1)
    cut = [one for pair in pairs([split_layer(layer, Alone(ranks=(0, 1)))]) for one in pair.linears]
    assert len(cut) == {"llama": 7, "gpt_neox": 4, "phi": 6, "glm4": 6}.get(name, 2)
    seen, last = {}, {}

    def note(linear, given, output):
        seen[linear] = [given[0].detach(), output.detach()]
        output.register_hook(seen[linear].append)

    for linear in cut:
        linear.register_forward_hook(note)
    for step in range(2):
        for linear in cut:
            columns = linear.matrix.shape[1]
            # At first others than those that are left out later.
            kept = torch.arange(step, columns - 2 + step)
            before = {} if linear.selection is None else linear.selection.last
            linear.selection = ColumnSelection(columns=columns, kept=kept, imputation=imputation, last=before)
            linear.weight.grad = None
        layer(torch.randn(2, 6, 32)).square().sum().backward()
        for linear, (value, output, gradient) in seen.items():
            kept = linear.selection.kept
            bias = 0 if linear.bias is None else linear.bias
            torch.testing.assert_close(output, value[..., kept] @ linear.matrix[:, kept].t() + bias)
            expected = torch.einsum("bso,bsi->oi", gradient, value[..., kept])
            whole = torch.zeros_like(linear.matrix)
            if imputation == "average":
                whole += expected.mean(1, keepdim=True)
            elif imputation == "same" and step:
                whole = last[linear].clone()
            whole[:, kept] = expected
            torch.testing.assert_close(linear.as_matrix(linear.weight.grad), whole, rtol=1e-4, atol=1e-5)
            last[linear] = torch.zeros_like(whole)
            last[linear][:, kept] = expected


def compiled_steps(world):
    """How many graphs have been compiled after each step of a compiled layer that is cut; its last output."""
    from ballast_trainer.models.hugging_face import from_config

    with host_seeded(0):
        layer = from_config(**families.arguments("llama")).build_layer(1)
    found, value = [], torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = layer(value)
    layer = split_layer(layer, world.tensor)
    for pair in pairs([layer]):
        pair.clock.running = True

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    layer.compile(backend=backend)
    counts = []
    for _ in range(4):
        output = layer(value)
        output.square().mean().backward()
        counts.append(len(found))
    return counts, (output - expected).abs().max().item()


@pytest.mark.processes
def test_a_compiled_layer_that_is_cut_is_not_compiled_again_in_each_step():
    """What counts and times collectives and products is no part of the graphs."""
    for counts, apart in on_ranks(compiled_steps, 2):
        assert 0 < counts[0] == counts[-1]
        assert apart < 1e-6


class Scaled(torch.optim.SGD):
    """An optimizer that changes gradients, by ``how`` of each, its parameter and the step, and descends."""

    def __init__(self, parameters, lr, how):
        super().__init__(parameters, lr=lr)
        self.how, self.device = how, torch.device("cpu")

    def step(self, closure=None):
        """Change, then descend."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                if parameter.grad is not None:
                    parameter.grad = self.how(parameter.grad, parameter, state["steps"])
        return super().step(closure)


OPTIMIZERS = {
    "of_rows": lambda g, p, step: g / g.norm(dim=-1, keepdim=True),
    "lars": lambda g, p, step: g * (p.norm() / g.norm()),
    "late shampoo": lambda g, p, step: torch.linalg.pinv(g).mT if step > 20 and g.dim() > 1 else g,
    "large alone": lambda g, p, step: g / g.norm() if min(g.shape) >= 128 else g,
    "clipped": lambda g, p, step: g / max(1.0, float(g.norm())),
    "vectors": lambda g, p, step: g / g.norm() if g.dim() == 1 else g,
    "sign": lambda g, p, step: g.sign(),
    "sophia": lambda g, p, step: (g / p.abs().clamp(min=1e-2)).clamp(-1, 1),
}


def scaled(name):
    return lambda parameters, rate: Scaled(parameters, rate, OPTIMIZERS[name])


of_rows, lars, late_shampoo, large_alone, clipped, vectors, sign, sophia = map(scaled, OPTIMIZERS)


def adafactor(parameters, learning_rate):
    return torch.optim.Adafactor(parameters, lr=learning_rate)


WHOLE = r"whole matrix .*parallelism\.tensor"


@pytest.mark.parametrize("rate", [0.1, 1e-6])
@pytest.mark.parametrize("name", [*(name.replace(" ", "_") for name in OPTIMIZERS), "adafactor"])
def test_an_optimizer_that_needs_whole_matrices_is_refused(name, rate):
    """Of a part of a matrix it would make another update than of the whole one, be it small, late or rare."""
    config = job("llama", parallelism={"tensor": 2})
    config["training"] |= {"optimizer": f"{__name__}:{name}", "learningRate": rate}
    if name in ("sign", "sophia"):
        ValidatedJob.from_mapping(config)
        return
    assert_refused(config, "training.optimizer", WHOLE)


def on_gpus_alone(parameters, learning_rate):
    def how(gradient, parameter, step):
        raise RuntimeError("expected a CUDA device")

    return Scaled(parameters, learning_rate, how)


def of_curvature(parameters, learning_rate):
    def how(gradient, parameter, step):
        return torch.autograd.grad(gradient.sum(), parameter)[0]

    return Scaled(parameters, learning_rate, how)


class SlowlyLarger(torch.optim.SGD):
    """An optimizer whose step size, as Prodigy's, waits for what it sums over all gradients."""

    def step(self, closure=None):
        """Sum, then descend."""
        for group in self.param_groups:
            for parameter in group["params"]:
                group["sum"] = group.get("sum", 0.0) + float(parameter.grad.square().sum())
        return super().step(closure)


def slowly_larger(parameters, learning_rate):
    return SlowlyLarger(parameters, lr=learning_rate)


def no_optimizer(parameters, learning_rate):
    return None


def matrices_alone(parameters, learning_rate):
    return torch.optim.Muon(parameters, lr=learning_rate)


REFUSED = {
    # Its step size may not show yet what it sums over all gradients: ranks would take steps of other sizes.
    "slowly_larger": WHOLE,
    # A kernel of a GPU's: whether it can have parts is not known here.
    "on_gpus_alone": r"not step on a CPU .*CUDA device.*no GPU",
    # Of second derivatives, for which gradients would need a graph: a GPU changes nothing.
    "of_curvature": r"an error of its own .*does not require grad",
    # As where layers are whole.
    "no_optimizer": "returned NoneType",
    "matrices_alone": "does not take a layer.s parameters",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_made_or_tried_is_a_mistake_of_its_field(name):
    """In words, before any rank has started."""
    if name == "on_gpus_alone" and torch.cuda.is_available():
        pytest.skip("it is tried on the GPU")
    config = job("llama", parallelism={"tensor": 2})
    config["training"]["optimizer"] = f"{__name__}:{name}"
    text = assert_refused(config, "training.optimizer", REFUSED[name])
    assert (name == "on_gpus_alone") == ("GPU" in text)


ADAPTERS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": "all-linear"}


def adapted(tmp_path, name, **fields):
    """A job that trains adapters of a checkpoint of the family."""
    pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**families.arguments(name))
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "base")
    config = job(name, **fields)
    config["training"]["learningRate"] = 1.0
    config["model"]["name"] = "ballast_trainer.models.hugging_face:pretrained"
    config["model"]["args"] = {
        "checkpoint": str(tmp_path / "base"),
        "peft": ADAPTERS | {"fan_in_fan_out": name == "gpt2"},
    }
    return config


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", first_daily(["llama", "gpt2", "phi3"]))
def test_adapters_of_maps_that_are_cut_learn_as_in_one_process(gang, tmp_path, name):
    """Curve and exported folder are those of one process: the half of each adapter on the cut side is cut."""
    config, folders = adapted(tmp_path, name), {}
    for kind, parallelism in (("alone", {}), ("cut", {"tensor": 2})):
        folders[kind] = tmp_path / f"{kind}-adapters"
        config |= {
            "export": {"path": str(folders[kind]), "format": "huggingFace"},
            "parallelism": parallelism,
        }
        config["checkpoint"] = {"path": str(tmp_path / kind), "everySteps": 4}
        if kind == "alone":
            expected = train_here(config).losses
    running = gang(config, ranks=2).succeeded()
    assert_same_curve(running.losses(), expected)
    from safetensors.torch import load_file

    found, wanted = (load_file(folders[kind] / "adapter_model.safetensors") for kind in ("cut", "alone"))
    assert found.keys() == wanted.keys()
    # They start at 0.
    assert max(value.abs().max() for key, value in wanted.items() if "lora_B" in key) > 1e-3
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_dropout": 0.1}, "a dropout would be drawn otherwise"),
        ({"use_dora": True}, "LlamaDecoderLayer, cut by its plan, "),
        ({"lora_dropout": 0.1, "target_modules": ["q_proj", "gate_proj"]}, None),
    ],
)
def test_adapters_that_cannot_be_cut_are_refused(tmp_path, fields, words):
    """A dropout of the units of one rank alone, norms of whole rows; a dropout before maps of all is none."""
    config = adapted(tmp_path, "llama", parallelism={"tensor": 2})
    config["model"]["args"]["peft"] = ADAPTERS | fields
    if words is None:
        ValidatedJob.from_mapping(config)
        return
    assert_refused(config, "parallelism.tensor", words)


def test_maps_of_one_input_give_its_gradient_after_a_forward_that_ended_between_them():
    """What one of them has read without gradients is not what the others read with them."""
    from ballast_trainer.models.hugging_face import from_config

    with host_seeded(0):
        layer = from_config(**families.arguments("llama")).build_layer(1)
    mlp = split_layer(layer, Doubled(ranks=(0, 1))).layer.mlp
    value = torch.randn(2, 6, 32)
    leaves = [value.clone().requires_grad_() for _ in range(2)]
    values = [leaf * 1 for leaf in leaves]
    with torch.no_grad():
        mlp.gate_proj(values[0])
    for value in values:
        mlp(value).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(
    ("part", "way", "words"),
    [
        ("act_fn", "by_turns", r"by_turns of mlp\.act_fn, in the plan of LlamaDecoderLayer"),
        ("down_proj", "colwise_gather_output", "LlamaDecoderLayer, cut by its plan, "),
    ],
)
def test_a_plan_that_is_not_known_or_does_not_fit_its_layer_is_refused(monkeypatch, part, way, words):
    """By the way, the part and the layer; or what the cut layer computes is compared with the whole one."""
    from transformers import LlamaConfig

    plan = {**LlamaConfig.base_model_tp_plan, f"layers.*.mlp.{part}": way}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    assert_refused(job("llama", parallelism={"tensor": 2}), "parallelism.tensor", words)
