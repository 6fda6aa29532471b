"""The whole model of a checkpoint under its own names: one file, or a folder of Hugging Face's.

Layers are read one after the other, without the optimizer's state.  What a change of the model has wrapped
or pruned gets its plain name and shape back where it has one (zeros where weights were pruned); what a change
has added, e.g. experts and their router, keeps the name that it has in the trained layer.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, Structure
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.output import ExportConfig, ExportFormat
from ballast_policies.contract.job.training import TrainingConfig
from torch import nn

from ballast_trainer.checkpoints import tensors
from ballast_trainer.checkpoints.folder import CheckpointFolder, sound_or_flaw, sync
from ballast_trainer.checkpoints.manifest import MANIFEST, Manifest, Patience
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import REMEMBERED
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.pruning.neurons import origin_of
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from ballast_trainer.dynamics.registry import build_dynamic, build_dynamics
from ballast_trainer.errors import CheckpointError, ConfigurationError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.protocol import Model, layer_without_memory
from ballast_trainer.seeding import host_seeded

_AGAIN = "To fix: name a directory with a whole checkpoint, as checkpoint.path has them"


def export_checkpoint(
    config: JobConfig,
    model: Model,
    folder: Path,
    output: Path,
    kind: ExportFormat,
    *,
    retry_seconds: float = 0.0,
) -> tuple[int, int]:
    """Write the newest whole checkpoint of a directory as one model: a file, or a folder of Hugging Face's.

    ``folder`` is of the job's checkpoints, or one of them; what storage does not give is tried again for
    ``retry_seconds``. Returns the checkpoint's step, and how many tensors were written.

    Raises:
        CheckpointError: there is none, it is of another model, or storage refuses the file.
        ConfigurationError: the model cannot be written in this format.
    """
    patience = Patience(retry_seconds)
    try:
        path, manifest = newest_sound(folder, patience)
        dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)
        found = whole_model(path, manifest, model, dynamics, config.training)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. To fix: the storage") from error
    write_model(found, output, kind, model)
    return manifest.step, len(found)


def check_export(model: Model, wanted: ExportConfig | None, changes: Sequence[DynamicConfig] = ()) -> None:
    """Refuse before the first step a format that the model does not have, or will not have.

    Raises:
        ConfigurationError: with the formats that it has.
    """
    if wanted is not None and wanted.format is ExportFormat.SAFETENSORS:
        for index in range(model.layer_count):
            layer = model.kept_layer(index)
            state = {} if layer is None else layer.state_dict(keep_vars=True)
            # What is no tensor, of get_extra_state, is refused where the layer is built.
            wide = (k for k, value in state.items() if getattr(value, "dtype", None) is torch.complex128)
            for name in wide:
                reason = f"safetensors has no complex128, as {name!r} of layer {index} is. To fix: torch"
                raise ConfigurationError("export.format", reason)
    if wanted is None or wanted.format is not ExportFormat.HUGGING_FACE:
        return
    if model.save_whole is None:
        raise ConfigurationError(
            "export.format",
            "huggingFace is for models of ballast_trainer.models.hugging_face. To fix: safetensors or torch",
        )
    _check_unchanged_names(model, changes)


def _check_unchanged_names(model: Model, configs: Sequence[DynamicConfig]) -> None:
    """Refuse to export a model of Hugging Face's as a folder where it gets or loses tensors.

    Raises:
        ConfigurationError: names the change and a tensor.
    """
    for config in configs:
        what = ""
        if config.pruning is not None and config.pruning.structure is not Structure.WEIGHTS:
            what = f"removes {config.pruning.structure}"
        change = build_dynamic(config, model.layer_count)
        for index in range(0 if what else model.layer_count):
            module = layer_without_memory(model, index)
            plain = _PlainNames.of(module)
            added = plain.added(change.prepare(index, module))
            if added:
                what = f"adds {added[0]!r} to layer {index}"
                break
        if what:
            raise ConfigurationError(
                "export.format",
                f"huggingFace is a folder of the model as it was, and {config.kind} {what}. "
                "To fix: safetensors or torch",
            )


def check_place(wanted: ExportConfig) -> None:
    """Refuse a place in which the export cannot be written; what is there stays as it is.

    Raises:
        CheckpointError: rank 0 cannot write there, or would replace what is no export.
    """
    path = Path(wanted.path)
    if wanted.format is ExportFormat.HUGGING_FACE:
        _refuse_others_files(path)
    elif path.is_dir():
        raise CheckpointError(f"{path} is a folder. To fix: in export.path, the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _partial(path)
        temporary.touch()
        _remove(temporary)
    except OSError as error:
        raise _not_written(path, error) from error


def newest_sound(folder: Path, patience: Patience) -> tuple[Path, Manifest]:
    """The newest checkpoint of a directory whose files are as they were written; nothing is changed there.

    ``folder``: of a job's checkpoints, or one of them.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / MANIFEST).exists():
        paths = [folder]
    else:
        names = CheckpointFolder(folder, keep=1, patience=lambda: patience).names()
        paths = [folder / name for name in names]
    problems = []
    for path in paths:
        found = sound_or_flaw(path, patience)
        if isinstance(found, Manifest):
            return path, found
        problems.append(f"{path.name}: {found.reason}")
    why = f"none can be used: {'; '.join(problems)}" if problems else "it has none"
    raise CheckpointError(f"{folder} has no checkpoint to export ({why}). {_AGAIN}")


@dataclasses.dataclass(slots=True)
class _PlainNames:
    """A layer's tensors before changes, held so that no other tensor takes the identity of one replaced."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> "_PlainNames":
        """Names before any change."""
        return cls(module.state_dict(keep_vars=True))

    def now(self, module: nn.Module) -> tuple[dict[str, str], set[str]]:
        """Names of the prepared layer's tensors: plain by the present one, and those that are transposed now.

        A tensor that a change has added keeps its name.
        """
        plain = {id(value): name for name, value in self.tensors.items()}
        names, transposed = {}, set()
        for name, value in module.state_dict(keep_vars=True).items():
            origin = origin_of(value)
            before = value if origin is None else origin
            # A tensor may have several names in a layer, e.g. the bias of RoBERTa's head.
            names[name] = name if self.tensors.get(name) is before else plain.get(id(before), name)
            if origin is not None and value.dim() > 1:
                transposed.add(name)
        return names, transposed

    def added(self, module: nn.Module) -> list[str]:
        """Names of the prepared layer's parameters that it did not have."""
        known = {id(value) for value in self.tensors.values()}
        return [
            name
            for name, value in module.named_parameters()
            if id(value) not in known and id(origin_of(value)) not in known
        ]


def whole_model(
    path: Path, manifest: Manifest, model: Model, dynamics: Sequence[Dynamic], training: TrainingConfig
) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers of a checkpoint, by their names in the whole model.

    Raises:
        CheckpointError: it is of another model.
        OSError: a file cannot be read.
    """
    if manifest.layer_count != model.layer_count:
        raise CheckpointError(
            f"{path} has {manifest.layer_count} layers, the model has {model.layer_count}. "
            "To fix: the configuration that the job ran with"
        )
    device = torch.device("cpu")
    world = World(epoch=1, rank=0, size=1, processes=("local",), device=device)
    plain = _PlainNames()

    def prepare(index: int, module: nn.Module) -> nn.Module:
        plain.tensors = _PlainNames.of(module).tensors
        for dynamic in dynamics:
            module = dynamic.prepare(index, module)
        return module

    found: dict[str, torch.Tensor] = {}
    for index in range(model.layer_count):
        layers = LayerSet(model, training, device, prepare)
        with host_seeded():
            layers.hold([layers.make(index)])
        module = layers[index].module
        names, transposed = plain.now(module)
        tensors.load(world, layers, path, Patience(0), optimizer=False)
        for name, tensor in _dense(module).items():
            value = tensor.t() if name in transposed else tensor
            whole = model.name_of(index, names.get(name, name))
            if whole in found and model.tied and torch.equal(found[whole], value):
                continue
            if whole in found:
                raise CheckpointError(
                    f"layer {index}: {whole!r} is the name of two tensors. "
                    "To fix: names that differ, from the model's parameter_name"
                )
            found[whole] = value.detach().contiguous().clone()
    return found


def _dense(module: nn.Module) -> dict[str, torch.Tensor]:
    """The layer's tensors, pruned ones as dense weights, without what changes remember of it."""
    state = {
        name: value
        for name, value in module.state_dict().items()
        if name.rpartition(".")[2] not in REMEMBERED
    }
    for path, child in module.named_modules():
        if isinstance(child, PrunableLinear):
            prefix = f"{path}." if path else ""
            state.pop(f"{prefix}mask")
            state.pop(f"{prefix}values", None)
            state[f"{prefix}weight"] = child.dense()
    return state


def write_model(found: Mapping[str, torch.Tensor], path: Path, kind: ExportFormat, model: Model) -> None:
    """Write the model; what was at ``path`` is replaced when the new one is complete.

    Raises:
        ConfigurationError: the model cannot be written in this format.
        CheckpointError: storage refuses it.
    """
    check_export(model, ExportConfig(path=str(path), format=kind))
    if kind is ExportFormat.HUGGING_FACE:
        _refuse_others_files(path)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        if kind is ExportFormat.HUGGING_FACE:
            assert model.save_whole is not None
            model.save_whole(found, temporary)
            _remove(path)
        elif kind is ExportFormat.TORCH:
            torch.save(dict(found), temporary)
        else:
            # safetensors gives its file to its owner alone.
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(dict(found), temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
        _last(temporary)
        temporary.rename(path)
    # A full disk is another error in each library.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(temporary)


def _partial(path: Path) -> Path:
    """Path of the file until it is complete."""
    return path.with_name(f".{path.name}.partial")


def _not_written(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the model cannot be written to {path}: {error}. "
        "To fix: a place in a directory that rank 0 can write to, with room"
    )


def _refuse_others_files(path: Path) -> None:
    """Refuse a folder that has more than an export in it: it would be lost."""
    if not path.exists():
        return
    others = (
        [
            part.name
            for part in path.iterdir()
            if part.is_dir() or part.suffix not in (".json", ".safetensors")
        ]
        if path.is_dir()
        else [path.name]
    )
    if others:
        raise CheckpointError(
            f"{path} has {others[0]}, which is no part of an export; nothing is replaced. "
            "To fix: a new folder, or an empty one"
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _last(path: Path) -> None:
    """Make what was written last through a loss of power."""
    for part in [path, *path.rglob("*")] if path.is_dir() else [path]:
        sync(part)
