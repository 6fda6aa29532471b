"""Models of Hugging Face's transformers as pipelines: embedding, layers, norm and head.

Decoders, encoders, encoders with decoders and image classifiers whose layers run one after the other.
``model.name`` is ``ballast_trainer.models.hugging_face:pretrained`` or ``:from_config``; ``decoder`` takes a
module apart.  Whether the parts one after the other compute what the model computes is tried first.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.data.collate import IGNORED
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.blocks import experts_of, note_choices
from ballast_trainer.models.chain import Call, Chain, Handed, LayerCalls, NoChainError, Packed
from ballast_trainer.models.deferred import DeferredWeights, deferred_weights
from ballast_trainer.models.loss_weights import counted_targets, cross_entropy
from ballast_trainer.models.protocol import Model
from ballast_trainer.trees import Tree, mapped

_TRIED = (2, 11)
"""Sequences and tokens of the trial; no size of a model, from which they have to be told."""

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable that keeps transformers from reading a whole file ahead."""

_PREDICT_NEXT = ("ForCausalLM", "GPT2LMHeadModel")
"""Endings of the names of classes that predict the next token."""

ATTENTION = ("self_attn", "attn", "attention", "self_attention")


class DecoderLayer(nn.Module):
    """A layer from hidden states to hidden states; the masks that its model makes are made for it.

    Attributes:
        width: of the hidden states.
        tried: shape of those that its model was tried with.
        config: of the model; None: it has none.
        plan: how parts of the layer are cut over a tensor group, by path, as its family states.
        among_experts: whether some layers of its model came with experts.
    """

    among_experts = False

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        calls: LayerCalls,
        members: set[str],
        config: Any,
        *,
        encodes: bool = False,
    ) -> None:
        # ``encodes``: what comes beside hidden states is the decoder's, for later.
        super().__init__()
        self._encodes = encodes
        self.layer, self.tried, self.config = layer, calls.tried, config
        self.width = calls.tried[-1]
        stated = getattr(config, "base_model_tp_plan", None) or {}
        # Newer releases also state how embeddings are cut, which are no part of a layer.
        self.plan = {path.partition(".*.")[2]: way for path, way in stated.items() if ".*." in path}
        note_choices(layer)
        self._index, self._calls, self._members = index, calls, members

    def forward(self, value: torch.Tensor | Packed | Handed) -> torch.Tensor | Packed | Handed:
        """[B, S, D] -> [B, S, D]; no position is padding."""
        if isinstance(value, Handed):
            memory = None if self._encodes else value.beside
            args, kwargs = value.filled(self._calls.of(self._index, value.hidden, memory))
            output = self.layer(value.hidden, *args, **kwargs)
            mixed, *results = output if isinstance(output, tuple) else (output,)
            return Handed(mixed, tuple(one for one in results if torch.is_tensor(one)), value.beside)
        if isinstance(value, Packed):
            call, positions = self._calls.of_packed(self._index, value)
            return Packed(self._run(value.hidden, call), positions)
        return self._run(value, self._calls.of(self._index, value))

    def _run(self, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        output = self.layer(hidden, *call[0], **call[1])
        mixed: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return mixed

    def _run_at(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # With a mask, gaps between positions are not taken for ends of packed sequences.
        every = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        calls = self._calls.made_for(hidden.detach(), position_ids=positions, attention_mask=every)
        return self._run(hidden, calls[self._index])

    def _path(self, *names: str) -> str:
        return "layer." + next((name for name in names if hasattr(self.layer, name)), names[0])

    def __getattr__(self, name: str) -> Any:
        """Members of :class:`~ballast_trainer.models.blocks.TransformerBlock` that the family has."""
        if name in self.__dict__.get("_members", ()):
            return {
                "run_at": self._run_at,
                "mlp_path": functools.partial(self._path, "mlp", "feed_forward", "ffn"),
                "attention_path": functools.partial(self._path, *ATTENTION),
            }[name]
        return super().__getattr__(name)


class EncoderStart(nn.Module):
    """Parts of a model before the layers of its encoder."""

    def __init__(self, first: nn.Module, name: str) -> None:
        super().__init__()
        self.first, self._name = first, name

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> Handed:
        """Both inputs -> hidden states, and the decoder's tokens. Raises ConfigurationError: one lacks."""
        needed = self._name, "decoder_input_ids"
        given = tuple(inputs) if isinstance(inputs, Mapping) else ("a tensor",)
        if not set(needed) <= set(given):
            both = " and ".join(needed)
            reason = f"inputs are {', '.join(map(str, given))}, and an encoder with a decoder takes {both}"
            raise ConfigurationError("data.name", f"{reason}. To fix: a dict of both, e.g. by data.collate")
        return Handed(self.first(inputs[self._name]), (), inputs["decoder_input_ids"])


class DecoderStart(nn.Module):
    """Parts of a model between the layers of its encoder and those of its decoder."""

    def __init__(self, last: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.last, self.first = last, first

    def forward(self, value: Handed) -> Handed:
        """Hidden states and the decoder's tokens -> its hidden states, and what the encoder returns."""
        return Handed(self.first(value.beside), (), self.last(value.hidden))


class DecoderEnd(nn.Module):
    """Parts of a model behind the layers of a decoder that has an encoder."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last

    def forward(self, value: Handed) -> torch.Tensor:
        """Hidden states -> logits."""
        logits: torch.Tensor = self.last(value.hidden)
        return logits


class _WithoutEncoder(nn.Module):
    """A model from what its encoder returned on; its parts are the model's own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self._width = _without(model, model.get_encoder()), model.config.hidden_size

    def forward(
        self, tokens: torch.Tensor, memory: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """The decoder's tokens and what the encoder returned [B, T, D] -> logits."""
        from transformers.modeling_outputs import BaseModelOutput

        memory = torch.zeros(len(tokens), 1, self._width, device=tokens.device) if memory is None else memory
        read = BaseModelOutput(last_hidden_state=memory)
        found = self.model(encoder_outputs=read, decoder_input_ids=tokens, use_cache=False, **options)
        logits: torch.Tensor = found.logits
        return logits


def _without(module: nn.Module, left_out: nn.Module) -> nn.Module:
    """The module without a part of it; all others are the same."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {
        name: None
        if part is None or part is left_out
        else _without(part, left_out)
        if left_out in part.modules()
        else part
        for name, part in module._modules.items()
    }
    return copied


class Routed(NamedTuple):
    """Hidden states, and of the routers so far: rows and sums of probabilities by expert [E], rows in all."""

    hidden: torch.Tensor | Packed
    chosen: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    rows: int = 0


class RoutedLayer(nn.Module):
    """A layer that hands on what its router's loss is computed from, over all layers together.

    Switch Transformer (Fedus et al. 2021), equations 4 to 6, as transformers computes it.
    """

    def __init__(self, inner: DecoderLayer, router: type[nn.Module], place: int, chosen: int) -> None:
        # Class of its routers, place of the logits in what they return, and experts of a token.
        super().__init__()
        self.inner = inner
        self._router, self._place, self._chosen = router, place, chosen

    def forward(self, value: torch.Tensor | Packed | Routed) -> Routed:
        """Run the layer, and add its routers' figures to those of the layers before."""
        found: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output[self._place] if isinstance(output, tuple) else output)

        routers = [part for part in self.inner.modules() if isinstance(part, self._router)]
        hooks = [part.register_forward_hook(note) for part in routers]
        before = value if isinstance(value, Routed) else Routed(value)
        try:
            hidden = self.inner(before.hidden)
        finally:
            for hook in hooks:
                hook.remove()
        _, chosen, probabilities, rows = before
        for logits in found:
            weights = functional.softmax(logits, dim=-1)
            experts = weights.topk(self._chosen, dim=-1).indices.flatten()
            counts = torch.zeros(logits.shape[-1], device=logits.device).index_add(
                0, experts, torch.ones(experts.shape, device=logits.device)
            )
            sums = weights.float().sum(0)
            chosen = counts if chosen is None else chosen + counts
            probabilities = sums if probabilities is None else probabilities + sums
            rows += len(logits)
        return Routed(hidden, chosen, probabilities, rows)


class _RoutedHead(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Routed) -> dict[str, torch.Tensor]:
        """Logits, and the loss of all routers."""
        assert value.chosen is not None and value.probabilities is not None
        loss = len(value.chosen) * (value.chosen / value.rows * (value.probabilities / value.rows)).sum()
        return {"logits": self.inner(value.hidden), "router_loss": loss}


def _routed_loss(output: Mapping[str, torch.Tensor], targets: torch.Tensor, *, weight: float) -> torch.Tensor:
    return cross_entropy(output["logits"], targets) + weight * output["router_loss"]


def decoder(model: Any) -> Model:
    """A model of transformers as a list of layers, e.g. a ``...ForCausalLM``.

    Args:
        model: whose forward runs the modules of one list, one after the other; also in a ``PeftModel``, of
            which the adapters are exported alone.

    Raises:
        ValueError: its layers are no chain, or compute something else than itself.
    """
    saved = model
    if type(model).__module__.startswith("peft."):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise ValueError(
                f"{model.active_peft_config.peft_type} puts tokens of its own before the inputs. "
                "To fix: adapters in the layers, e.g. peft_type: LORA"
            )
        model = model.get_base_model()
    name = type(model).__name__
    config = getattr(model, "config", None)
    fields = {} if config is None else vars(config)
    dropped = [field for field, value in fields.items() if field.endswith("layerdrop") and value]
    if dropped:
        raise ValueError(f"{name} leaves out layers at random ({dropped[0]}). To fix: {dropped[0]}: 0.0")
    if fields.get("attention_type") == "block_sparse":
        # Families with it change to full attention, for good, where they see short sequences, as on trial.
        raise ValueError(f"{name} attends in sparse blocks. To fix: attention_type: original_full")
    if fields.get("apply_spec_augment"):
        raise ValueError(f"{name} masks its inputs at random. To fix: apply_spec_augment: false")
    inputs = _inputs_of(model, name)
    taken = inspect.signature(model.forward).parameters
    routed = bool(getattr(config, "output_router_logits", False))
    options = {
        option: False
        for option in ("use_cache", *(["output_router_logits"] if routed else []))
        if option in taken or option == "output_router_logits"
    }
    modes = [(part, part.training) for part in model.modules()]
    caches = getattr(config, "use_cache", None)
    if config is not None and caches:
        config.use_cache = False
    model.eval()
    packs = False
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = cross_entropy
    try:
        if getattr(config, "is_encoder_decoder", False):
            layers = _encoder_and_decoder(model, inputs)
        else:
            chain = Chain(model, inputs, options)
            layers, loss = _layers_of(model, chain, routed=routed, taken=set(taken))
            # Layers without attention carry a state from sample to sample.
            attends = all(any(hasattr(layer, part) for part in ATTENTION) for layer in chain.layers)
            packs = attends and name.endswith(_PREDICT_NEXT) and "position_ids" in taken
        packs = _try(model, layers, loss, inputs, options, labelled="labels" in taken, packs=packs)
    except NoChainError as error:
        raise ValueError(f"{name} is no chain of layers: {error}. {_FIX}") from error
    finally:
        for part, mode in modes:
            part.training = mode
        if config is not None and caches:
            config.use_cache = caches
    made = Model.from_layers(
        layers,
        loss=loss,
        loss_weight=counted_targets,
        family="transformer",
        independent_layers=type(model).__module__.startswith("transformers.models."),
        whole=model,
    )
    saving = functools.partial(_save, model, saved)
    return dataclasses.replace(
        made, save_whole=saving, takes_positions=packs, predicts_next=name.endswith(_PREDICT_NEXT)
    )


def _encoder_and_decoder(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[nn.Module]:
    main = model.main_input_name
    try:
        read = Chain(model.get_encoder(), inputs[main], {}, hands_on=True)
        written = Chain(_WithoutEncoder(model), inputs["decoder_input_ids"], {}, hands_on=True)
        layers: list[nn.Module] = [EncoderStart(read.first(), main)]
        for chain in (read, written):
            encodes = chain is read
            calls = chain.calls(None if encodes else read.output.last_hidden_state)
            layers += [
                DecoderLayer(layer, i, calls, {"mlp_path"}, model.config, encodes=encodes)
                for i, layer in enumerate(chain.layers)
            ]
            layers.append(
                DecoderStart(read.last(), written.first()) if encodes else DecoderEnd(written.last())
            )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        # A forward of a family that does more than run its encoder, and then its decoder.
        raise NoChainError(f"its forward does not run on parts of it ({error})") from error
    return layers


def _inputs_of(model: Any, name: str) -> Tree:
    """A few samples: tokens, the second sequence with padding at its end, images, or sounds."""
    config: Any = getattr(model, "config", None)
    device = next(model.parameters()).device
    kind = getattr(model, "main_input_name", "input_ids")
    if getattr(config, "is_encoder_decoder", False):
        if kind != "input_ids" and (kind != "input_features" or not hasattr(config, "num_mel_bins")):
            raise ValueError(f"{name} takes {kind!r}, neither tokens nor sounds. {_FIX}")
        tokens = torch.arange(22, device=device).reshape(_TRIED) * 5 % (_vocabulary(model) - 1)
        if kind == "input_ids":
            return {kind: tokens[:, :7] + 1, "decoder_input_ids": tokens}
        shape = _TRIED[0], config.num_mel_bins, 2 * config.max_source_positions
        sounds = torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).reshape(shape)
        return {kind: sounds, "decoder_input_ids": tokens}
    if kind == "pixel_values":
        size = getattr(config, "image_size", 224)
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (_TRIED[0], getattr(config, "num_channels", 3), *sides)
        return torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).reshape(shape)
    if kind != "input_ids":
        raise ValueError(f"{name} takes {kind!r}, neither tokens nor images. {_FIX}")
    vocabulary = _vocabulary(model)
    tokens = torch.arange(_TRIED[0] * _TRIED[1], device=device).reshape(_TRIED) * 7 % vocabulary
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        tokens[1, -3:] = padding
    return tokens


def _vocabulary(model: Any) -> int:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model
    count: int = next(embedding.parameters()).shape[0]
    return count


def _layers_of(
    model: Any, chain: Chain, *, routed: bool, taken: set[str]
) -> tuple[list[nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]:
    config = getattr(model, "config", None)
    members = {"mlp_path"}
    if {"position_ids", "attention_mask"} <= taken:
        members.add("run_at")
    plain = not _windows(config) and getattr(config, "_attn_implementation", "sdpa") == "sdpa"
    if plain and (config is None or type(model).__name__.endswith(_PREDICT_NEXT)):
        # Causal, and without a mask.
        members.add("attention_path")
    calls = chain.calls()
    inner = [DecoderLayer(layer, i, calls, members, config) for i, layer in enumerate(chain.layers)]
    among_experts = any(experts_of(layer) for layer in chain.layers)
    for one in inner:
        one.among_experts = among_experts
    if not routed:
        return [chain.first(), *inner, chain.last()], cross_entropy
    name = type(model).__name__
    recorders = [getattr(part, "_can_record_outputs", None) or {} for part in model.modules()]
    recorder: Any = next((found["router_logits"] for found in recorders if "router_logits" in found), None)
    router, chosen = getattr(recorder, "target_class", None), getattr(config, "num_experts_per_tok", None)
    weight = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))
    if router is None or chosen is None or weight is None:
        raise ValueError(
            f"{name} adds a loss of its routers (output_router_logits: true) that is not computed here as it "
            "computes it. To fix: output_router_logits: false"
        )
    layers = [RoutedLayer(layer, router, recorder.index, chosen) for layer in inner]
    return [chain.first(), *layers, _RoutedHead(chain.last())], functools.partial(_routed_loss, weight=weight)


def _windows(config: Any) -> bool:
    """True if some layers attend through masks other than the causal one."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    others = (
        "alibi",
        "attention_chunk_size",
        *([] if hasattr(config, "layer_types") else ["sliding_window"]),
    )
    return bool(kinds) or any(getattr(config, field, None) for field in others)


def _save(model: Any, saved: Any, found: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write ``model``, or its adapters where it is in a ``PeftModel``, by ``save_pretrained`` of ``saved``.

    Raises:
        ConfigurationError: it has not all of them, or others.
    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    other = sorted(own.keys() ^ found.keys())
    other += sorted(name for name in own.keys() & found.keys() if own[name] != found[name].shape)
    if other:
        reason = (
            f"{len(other)} tensors are not those of {type(model).__name__}, e.g. {other[0]}: a change "
            "in dynamics has added or cut them. To fix: safetensors or torch"
        )
        raise ConfigurationError("export.format", reason)
    # The model's own weights may have no memory. What is one parameter under several names stays one: in an
    # adapter's wrapper transformers cannot tie it.
    weights, ones = dict(found), dict[int, nn.Parameter]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        one = nn.Parameter(found[name], requires_grad=parameter.requires_grad)
        weights[name] = ones.setdefault(id(parameter), one)
    model.load_state_dict(weights, assign=True)
    saved.save_pretrained(path)
    # A card of the model, for the hub.
    (path / "README.md").unlink(missing_ok=True)


def from_config(*, model_type: str, architecture: str | None = None, **config: Any) -> Model:
    """A model with random weights.

    Args:
        model_type: ``llama``, ``qwen3``, ``gpt2`` and so on, as transformers names it.
        architecture: class of transformers, e.g. ``BertForSequenceClassification``; None: the one that
            predicts the next token, else masked tokens, else the class of an image.
        config: fields of the family's configuration; its own defaults count, e.g. tied weights in GPT-2.

    Raises:
        ValueError: its layers cannot run one after the other.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        near = ", ".join(difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)) or "llama, gpt2"
        raise ValueError(f"transformers has no model_type {model_type!r}. To fix: e.g. {near}")
    made = AutoConfig.for_model(model_type, **config)
    return decoder(_built(made, architecture, lambda build, **how: build._from_config(made, **how)))


def pretrained(
    *, checkpoint: str, architecture: str | None = None, peft: Mapping[str, Any] | None = None
) -> Model:
    """A model with the weights, in fp32, of a folder that ``save_pretrained`` wrote, or of a name on the hub.

    Args:
        checkpoint: folder or name.
        architecture: class of transformers; None: the checkpoint's own, else as of :func:`from_config`.
        peft: fields of an adapter's configuration in the package peft, ``peft_type`` among them, e.g.
            ``{"peft_type": "LORA", "r": 8}``: the adapters alone are trained, and exported.

    Raises:
        ValueError: its layers cannot run one after the other, or there are no such adapters.
    """
    from transformers import AutoConfig

    made = AutoConfig.from_pretrained(checkpoint)
    own = (made.architectures or [""])[0]
    if architecture is None and ("For" in own or own.endswith("HeadModel")):
        architecture = own
    with _read_by_tensor():
        whole = _built(
            made,
            architecture,
            # Of checkpoints in bf16, too: ``training.dtype`` says what the weights are.
            lambda build, **how: build.from_pretrained(checkpoint, dtype=torch.float32, **how),
        )
    return decoder(whole if peft is None else _with_adapters(whole, peft))


def _with_adapters(model: Any, fields: Mapping[str, Any]) -> Any:
    """The model in a ``PeftModel``."""
    from peft import PeftType, get_peft_config, get_peft_model

    if fields.get("peft_type") not in PeftType.__members__:
        raise ValueError(
            f"peft.peft_type is {fields.get('peft_type')!r}. To fix: e.g. LORA, of {', '.join(PeftType)}"
        )
    return get_peft_model(model, get_peft_config(dict(fields)))


class _Slice:
    """A tensor of a file, which is read again for each layer that has it."""

    def __init__(self, weights: DeferredWeights, file: str, name: str, known: Any) -> None:
        self._weights, self._file, self._name, self._known = weights, file, name, known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name)

    def __getitem__(self, part: Any) -> torch.Tensor:
        if part is not Ellipsis:
            found: torch.Tensor = self._known[part]
            return found
        return self._weights.read(self._read)

    def _read(self) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._file, framework="pt") as file:
            # A copy, as transformers takes it: of a file that may be replaced.
            tensor: torch.Tensor = file.get_slice(self._name)[...]
            return tensor


class _File:
    """``safetensors.safe_open`` in transformers' place of it."""

    def __init__(self, weights: DeferredWeights, file: str, **options: Any) -> None:
        from safetensors import safe_open

        self._weights, self._file = weights, str(file)
        self._opened: Any = safe_open(file, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> "_File":
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def get_slice(self, name: str) -> _Slice:
        """Slice as of ``safe_open``."""
        return _Slice(self._weights, self._file, name, self._opened.get_slice(name))


@contextlib.contextmanager
def _read_by_tensor() -> Iterator[None]:
    """Let ``from_pretrained`` read one tensor of safetensors after the other, none of which stays."""
    from transformers import modeling_utils

    weights = deferred_weights()
    if weights is None or not hasattr(modeling_utils, "safe_open"):
        yield
        return
    opened, threads = modeling_utils.safe_open, os.environ.get(_NO_THREADS)
    modeling_utils.safe_open = functools.partial(_File, weights)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        modeling_utils.safe_open = opened
        del os.environ[_NO_THREADS]
        if threads is not None:
            os.environ[_NO_THREADS] = threads


def _built(config: Any, architecture: str | None, build: Callable[..., Any]) -> Any:
    """A configuration's model, with ``scaled_dot_product_attention`` if it can. Raises ValueError: none."""
    import transformers

    kinds = ["CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"]
    if getattr(config, "is_encoder_decoder", False):
        kinds = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"]
    elif not getattr(config, "is_decoder", True):
        # An encoder of which transformers also has a decoder.
        kinds.insert(0, kinds.pop(1))
    mappings = [getattr(transformers, f"MODEL_FOR_{kind}_MAPPING") for kind in kinds]
    found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if architecture is not None:
        found = getattr(transformers, architecture, None)
        if not isinstance(found, type):
            raise ValueError(f"transformers has no class {architecture!r}. To fix: e.g. LlamaForCausalLM")
    if found is None:
        raise ValueError(f"{config.model_type!r} predicts neither tokens nor classes of images. {_FIX}")
    try:
        return build(found, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return build(found, attn_implementation="eager")


_FIX = "To fix: give the layers to Model.from_layers (docs/trainer-models.md, A model of your own)"


@torch.no_grad()
def _try(
    model: Any,
    layers: list[nn.Module],
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: Tree,
    options: Mapping[str, Any],
    *,
    labelled: bool,
    packs: bool,
) -> bool:
    """Compare the parts with the whole, in evaluation mode, and their losses where it has one.

    Returns:
        Whether the samples compute the same in one row, where that is to be tried (``packs``).

    Raises:
        ValueError: they differ.
    """
    name = type(model).__name__
    value: Tree = inputs
    row: Tree = _in_one_row(inputs) if packs else None
    for layer in layers:
        value = layer.eval()(value)
        try:
            row = None if row is None else layer(row)
        except (RuntimeError, ValueError, TypeError, IndexError):
            # Its masks or positions are not made for rows of samples.
            row = None
    logits = value["logits"] if isinstance(value, dict) else value
    # The last input has the targets' shape.
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    run = functools.partial(model, **named) if named else functools.partial(model, inputs)
    last = list(named.values())[-1] if named else inputs
    output = run(**options)
    whole = getattr(output, "logits", output)
    if not isinstance(whole, torch.Tensor) or logits.shape != whole.shape:
        raise ValueError(f"{name} gives no logits that its layers give. {_FIX}")
    apart = float((logits - whole).abs().max())
    if not apart <= 1e-3 * max(1.0, float(whole.abs().max())):
        raise ValueError(
            f"the layers of {name} one after the other do not compute what it computes: its logits are up to "
            f"{apart:.3g} apart. {_FIX}"
        )
    if row is not None:
        packed = (row["logits"] if isinstance(row, dict) else row)[0, : last.numel()]
        apart = float((packed - whole.flatten(0, 1)).abs().max())
        # Samples that see each other a little differ by more than rounding.
        rounding = min(100 * torch.finfo(whole.dtype).eps, 0.05)
        row = row if apart <= rounding * float(whole.abs().max()) else None
    if not labelled:
        return row is not None
    problem = getattr(getattr(model, "config", None), "problem_type", None) or "single_label_classification"
    if whole.shape[-1] == 1 or problem != "single_label_classification":
        raise ValueError(f"{name} has a loss of its own, no cross entropy (num_labels, problem_type). {_FIX}")
    rows = torch.arange(len(last), device=whole.device)
    targets = (last if whole.dim() == 3 else rows) % whole.shape[-1]
    its_own = run(labels=targets).loss
    wanted, rounding = float(its_own), max(1e-3, torch.finfo(its_own.dtype).eps)
    ahead = functional.pad(targets, (0, 1), value=IGNORED)[:, 1:] if whole.dim() == 3 else targets
    # As in training: of outputs in full precision, whatever the model is stored in.
    full = mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, value)
    found = [float(loss(full, one)) for one in (ahead, targets)]
    if not min(abs(one - wanted) for one in found) <= rounding * max(1.0, abs(wanted)):
        raise ValueError(
            f"{name} has a loss of its own: it is {wanted:.5g} on a few tokens, and {found[0]:.5g} as cross "
            f"entropy of its logits. {_FIX}"
        )
    return row is not None


def _in_one_row(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The samples one after the other, and two tokens of filling."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens))
    row = {"input_ids": tokens.flatten(), "position_ids": positions}
    return {name: functional.pad(one, (0, 2))[None] for name, one in row.items()}
