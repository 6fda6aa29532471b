"""Exports: the whole model under its own names, which loads in one process and has the same loss."""

import json

import pytest
import torch
from ballast_policies.contract.job.output import ExportConfig
from ballast_trainer.checkpoints.export import check_export, newest_sound
from ballast_trainer.checkpoints.manifest import Patience
from ballast_trainer.cli.main import main
from ballast_trainer.errors import CheckpointError, ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.models.protocol import Model
from ballast_trainer.seeding import host_seeded
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from tests.support.examples import first_daily
from tests.support.one_process import train_here
from tests.trainer.models import families

PRUNED = {"kind": "pruning", "startStep": 1, "endStep": 3, "everySteps": 1, "target": 0.95}
SLIGHTLY = PRUNED | {"target": 0.5}
FROZEN = {"kind": "freezing", "everySteps": 1, "target": 0.5, "freezing": {"criterion": "plasticity"}}
TEXT = {"name": "tests.support.held_data:text", "args": {"context": 8}}
LLAMA, GPT2 = (families.arguments(name) | {"vocab_size": 256} for name in ("llama", "gpt2"))
ROBERTA = families.arguments("bert") | {"model_type": "roberta", "vocab_size": 256, "pad_token_id": 1}
"""Its head has one bias under two names."""


@pytest.fixture
def job(small_config, tmp_path):
    """``job(**fields)``: four steps of a small model, saved and evaluated at the end."""

    def make(**fields):
        arguments = {"dim": 16, "heads": 2, "context": 8, "dropout": 0.1}
        fields = {"model": {"name": "gpt", "layers": 5, "args": arguments}, **fields}
        evaluation = {"batches": 2} | ({"data": fields["data"]} if "data" in fields else {})
        saved = {"path": str(tmp_path / "saved")}
        return small_config(totalSteps=4, checkpoint=saved, evaluation=evaluation, **fields)

    return make


def hugging_face(arguments, function="from_config"):
    """The job's fields for a model of that library, trained on text."""
    pytest.importorskip("transformers")
    return {
        "model": {"name": f"ballast_trainer.models.hugging_face:{function}", "args": arguments},
        "data": TEXT,
    }


def loss_of(config, module):
    """Loss of a whole module on the job's validation data."""
    built = ValidatedJob.from_mapping(config)
    data = built.validation
    losses = []
    with torch.no_grad(), host_seeded():
        for number in range(data.count):
            inputs, targets = data.batch(data.seed, number, 8)
            losses.append(float(built.model.loss(module.eval()(inputs), targets)))
    return sum(losses) / len(losses)


def plain(config):
    """The job's model in one piece, with other weights."""
    model = ValidatedJob.from_mapping(config).model
    return nn.Sequential(*(model.build_layer(index) for index in range(model.layer_count)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    first_daily(
        [
            ("torch", [SLIGHTLY]),
            *(("safetensors", changes) for changes in ([PRUNED], [FROZEN], [SLIGHTLY], [])),
        ],
        3,
    ),
    ids=["torch, dense with zeros", "sparse", "freezing", "dense with zeros", "none"],
)
def test_an_exported_model_has_the_loss_of_the_job(job, tmp_path, kind, changes):
    """Strictly loaded into the plain model, whatever has changed it while it was trained."""
    path = tmp_path / "exports" / "model"
    config = job(dynamics=changes, export={"path": str(path), "format": kind})
    told = train_here(config)
    (event,) = [event for event in told.events if event["event"] == "export"]
    whole = plain(config)
    found = torch.load(path, weights_only=True) if kind == "torch" else load_file(path)
    assert event["tensors"] == len(found) and [p.name for p in path.parent.iterdir()] == ["model"]
    whole.load_state_dict(found, strict=True)
    assert loss_of(config, whole) == pytest.approx(told.evaluations()[4], abs=1e-5)


@pytest.mark.slow
def test_what_a_change_has_added_keeps_its_name(job, tmp_path):
    """Experts and their router beside the model's own names."""
    path = tmp_path / "model"
    train_here(job(dynamics=[{"kind": "mixtureOfExperts"}], export={"path": str(path)}))
    names = set(load_file(path))
    assert "2.mlp.router.weight" in names and "2.mlp.experts.0.up.weight" in names
    assert "1.mlp.up.weight" in names


class Whole(nn.Module):
    """A model with names of its own."""

    def __init__(self):
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 2)


def named(with_whole=True):
    module = Whole()
    return Model.from_layers(
        [module.front, nn.Sequential(nn.Tanh(), module.back)],
        loss=nn.functional.mse_loss,
        batch=lambda seed, step, size: (torch.ones(size, 4), torch.ones(size, 2)),
        whole=module if with_whole else None,
    )


@pytest.mark.parametrize("with_whole", [True, False])
def test_names_are_those_of_the_user_s_module(job, tmp_path, with_whole):
    """Where the user gives the whole module; else those of the layers in a row."""
    path = tmp_path / "model"
    model = {"name": f"{__name__}:named", "args": {"with_whole": with_whole}}
    train_here(job(model=model, export={"path": str(path)}))
    if with_whole:
        Whole().load_state_dict(load_file(path), strict=True)
    else:
        assert set(load_file(path)) == {"0.weight", "0.bias", "1.1.weight", "1.1.bias"}


class OneBlock(nn.Module):
    """Input, a block that comes twice, and an output tied to the input, which has two names."""

    def __init__(self):
        super().__init__()
        self.front, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
        self.back = nn.Linear(4, 4, bias=False)
        self.back.weight = self.front.weight

    def forward(self, value):
        return self.back(self.block(self.block(self.front(value))))


def one_block():
    module = OneBlock()
    return Model.from_layers(
        [module.front, module.block, module.block, module.back],
        loss=nn.functional.mse_loss,
        batch=lambda seed, step, size: (torch.ones(size, 4), torch.ones(size, 4)),
        whole=module,
    )


def test_tied_weights_have_all_the_names_of_the_user_s_module(job, tmp_path):
    """Two names of one weight, and one name of a block that is two layers."""
    path = tmp_path / "model"
    told = train_here(job(model={"name": f"{__name__}:one_block"}, export={"path": str(path)}))
    found = load_file(path)
    module = OneBlock()
    module.load_state_dict(found, strict=True)
    assert torch.equal(found["front.weight"], found["back.weight"])
    loss = nn.functional.mse_loss(module(torch.ones(1, 4)), torch.ones(1, 4))
    assert float(loss.detach()) == pytest.approx(told.evaluations()[4], abs=1e-6)


class Logits(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, tokens):
        return self.whole(tokens).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "changes"),
    first_daily(
        [
            (LLAMA | {"tie_word_embeddings": True}, False),
            (GPT2 | {"tie_word_embeddings": False}, True),
            (ROBERTA, False),
            (LLAMA, True),
            (GPT2, False),
        ],
        3,
    ),
    ids=["tied llama", "pruned gpt2", "roberta", "pruned llama", "gpt2"],
)
def test_a_hugging_face_model_is_saved_for_from_pretrained(job, tmp_path, arguments, changes):
    """A folder that transformers loads by itself, with the job's loss; tied weights stay tied."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "llama"
    config = job(
        **hugging_face(arguments),
        dynamics=[SLIGHTLY] if changes else [],
        export={"path": str(folder), "format": "huggingFace"},
    )
    told = train_here(config)
    kind = "MaskedLM" if arguments is ROBERTA else "CausalLM"
    loaded = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder)

    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == (not changes)
    assert loss_of(config, Logits(loaded)) == pytest.approx(told.evaluations()[4], abs=1e-5)
    # Again, over what is there.
    assert export(tmp_path, config, "--format", "huggingFace", "--output", folder).exit_code == 0
    (folder / "notes.txt").write_text("mine")
    refused = export(tmp_path, config, "--format", "huggingFace", "--output", folder)
    assert "nothing is replaced. To fix" in refused.output
    assert (folder / "notes.txt").exists() and (folder / "config.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
def test_adapters_are_saved_for_peft_s_from_pretrained(job, tmp_path):
    """`peft` trains them, and a head that was tied, alone; the folder of these has the job's loss."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapters"
    arguments = LLAMA | {"tie_word_embeddings": True}
    own = transformers.AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    transformers.AutoModelForCausalLM.from_config(own).save_pretrained(base)
    adapters = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["lm_head"],
    }
    config = job(
        **hugging_face({"checkpoint": str(base), "peft": adapters}, "pretrained"),
        training={"learningRate": 0.05},
        export={"path": str(folder), "format": "huggingFace"},
    )
    told = train_here(config)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    untrained = loss_of(config, Logits(whole))
    loaded = peft.PeftModel.from_pretrained(whole, folder)
    assert loss_of(config, Logits(loaded)) == pytest.approx(told.evaluations()[4], abs=1e-5)
    assert told.evaluations()[4] < untrained - 1e-3
    names = load_file(folder / "adapter_model.safetensors")
    assert len(names) > 1 and all("lora_" in name or "lm_head" in name for name in names)
    for name, value in loaded.unload().state_dict().items():
        assert name == "lm_head.weight" or torch.equal(value, before[name]), name
    # Again, over what is there.
    assert export(tmp_path, config, "--format", "huggingFace", "--output", folder).exit_code == 0
    for other, words in (
        (
            {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2},
            "peft_type: LORA",
        ),
        ({"r": 2}, "peft.peft_type is None. To fix: e.g. LORA"),
    ):
        config["model"]["args"]["peft"] = other
        with pytest.raises(ConfigurationError, match=words):
            ValidatedJob.from_mapping(config)


def export(tmp_path, config, *options):
    """``ballast-train export``."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return CliRunner().invoke(main, ["export", "--config", str(path), *map(str, options)])


@pytest.mark.slow
def test_the_command_exports_the_newest_whole_checkpoint(job, tmp_path):
    """A damaged one is passed over, and nothing in the directory changes."""
    config = job()
    config["checkpoint"]["everySteps"] = 2
    train_here(config)
    saved = tmp_path / "saved"
    file = next((saved / "step-00000004").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    before = sorted(path.name for path in saved.iterdir())
    done = export(tmp_path, config, "--output", tmp_path / "model")
    assert (done.exit_code, done.output.partition(":")[0]) == (0, "step 2")
    assert sorted(path.name for path in saved.iterdir()) == before
    of_one = export(tmp_path, config, "--checkpoint", saved / "step-00000002", "--output", tmp_path / "again")
    assert of_one.exit_code == 0
    assert (tmp_path / "model").read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(job, tmp_path):
    """With the reason and what to do; nothing is left behind."""
    config = job()
    train_here(config)
    output = ["--output", tmp_path / "out" / "model"]
    smaller = job(model={**config["model"], "layers": 4})
    assert "has 5 layers, the model has 4. To fix" in export(tmp_path, smaller, *output).output
    wider = job(model={"name": "gpt", "layers": 5, "args": {"dim": 32, "heads": 2, "context": 8}})
    assert "does not fit layer 0" in export(tmp_path, wider, *output).output
    assert "To fix: safetensors" in export(tmp_path, config, *output, "--format", "huggingFace").output
    nowhere = export(tmp_path, config, *output, "--checkpoint", tmp_path / "none")
    assert "has no checkpoint to export" in nowhere.output
    assert not (tmp_path / "out").exists()
    taken = export(tmp_path, config, "--output", tmp_path / "saved")
    assert "cannot be written to" in taken.output and "To fix" in taken.output
    assert not list(tmp_path.glob(".*.partial"))


class Noting(nn.Linear):
    """Saves what is no tensor."""

    def get_extra_state(self):
        return {"calls": 1}


def test_what_cannot_be_exported_after_the_last_step_is_refused_before_the_first(job, tmp_path):
    """The format when the configuration is read, the place when the job begins; nothing is left there."""
    with pytest.raises(ConfigurationError, match=r"export.format: huggingFace is for .*To fix: safetensors"):
        ValidatedJob.from_mapping(job(export={"path": str(tmp_path / "model"), "format": "huggingFace"}))
    layers = Noting(4, 4), nn.Linear(4, 4, dtype=torch.complex128)
    wide = Model.from_layers(layers, loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=r"no complex128, as .weight. of layer 1 is\. To fix: torch"):
        check_export(wide, ExportConfig(path=str(tmp_path / "model")))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "model", tmp_path / "folder"):
        with pytest.raises(CheckpointError, match=r"^export.path: .*To fix"):
            train_here(job(export={"path": str(path)}))
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").glob("step-*"))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_a_directory_of_damaged_checkpoints_names_the_damage(job, tmp_path):
    train_here(job())
    (tmp_path / "saved" / "step-00000004" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-00000004: manifest.json is damaged.*To fix"):
        newest_sound(tmp_path / "saved", Patience(0))


@pytest.mark.slow
def test_a_model_that_cannot_be_written_ends_the_job_and_is_exported_by_the_next_launch(job, tmp_path):
    """The state is saved; the next launch trains no step, and reads no data of one that there is not."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    train_here(job() | {"totalSteps": 2})
    reading = {"dataloaderNumWorkers": 1, "recompute": True}
    config = job(export={"path": str(blocked / "model")}, training=reading)
    with pytest.raises(CheckpointError, match=r"all steps are done and saved, but .*To fix"):
        train_here(config)
    blocked.unlink()
    told = train_here(config)
    assert told.losses == {} and (blocked / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    first_daily(
        [
            ({"kind": "mixtureOfExperts", "experts": {"everyBlocks": 1}}, "mixtureOfExperts adds 'layer.mlp"),
            ({"kind": "pruning", "target": 0.5, "pruning": {"structure": "heads"}}, "pruning removes heads"),
            (
                {"kind": "mixtureOfDepths", "target": 0.5, "depths": {"everyBlocks": 1}},
                "mixtureOfDepths adds",
            ),
            ({"kind": "earlyExit", "exits": {"confidence": "head"}}, "earlyExit adds"),
        ],
        2,
    ),
)
def test_a_folder_of_a_model_with_other_tensors_is_refused_before_the_first_step(
    job, tmp_path, change, words
):
    """``from_pretrained`` could not load it; what changes no tensors is no obstacle."""
    wanted = {"path": str(tmp_path / "model"), "format": "huggingFace"}
    with pytest.raises(ConfigurationError, match=rf"export.format: .*{words}.*To fix: safetensors"):
        ValidatedJob.from_mapping(job(**hugging_face(LLAMA), export=wanted, dynamics=[change]))
    harmless = [SLIGHTLY, FROZEN, {"kind": "sparseAttention"}, {"kind": "earlyExit"}]
    ValidatedJob.from_mapping(job(**hugging_face(LLAMA), export=wanted, dynamics=harmless))


@pytest.mark.slow
def test_cut_maps_of_gpt2_are_exported_as_it_has_them(job, tmp_path):
    """Under its names, inputs first; as many neurons less in one as in the other."""
    change = SLIGHTLY | {"pruning": {"structure": "neurons"}}
    train_here(job(**hugging_face(GPT2), dynamics=[change], export={"path": str(tmp_path / "model")}))
    found = load_file(tmp_path / "model")
    for block in range(3):
        into = found[f"transformer.h.{block}.mlp.c_fc.weight"].shape
        away = found[f"transformer.h.{block}.mlp.c_proj.weight"].shape
        assert into == away[::-1]
        assert into[0] == 32 and into[1] < 128
