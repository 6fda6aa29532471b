"""Layers as measured on each GPU type, at each tensor degree and microbatch size.

A file is either one :class:`GpuProfile`, a list of them, or as Sailor's artifact has it (Strati et al., SOSP
2025): ``MODEL_GPU.json``, microbatch -> tensor degree -> layer -> seconds of forward, backward and update.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ballast_policies.contract.decode import decode
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.planning.partition import PlanningError, sums_of
from ballast_policies.planning.profile import ProfiledLayer, ProfileFile

Key = tuple[str, int, int]
"""GPU type, tensor degree, samples of a microbatch."""

_Layer = Annotated[str, Field(pattern=r"^\d{1,5}$")]
_Degree = Annotated[str, Field(pattern=r"^[1-9]\d{0,4}$")]
_Row = Annotated[list[Annotated[float, Field(ge=0, le=MOST_SECONDS)]], Field(min_length=3, max_length=3)]
"""Seconds of a layer's forward, backward and update."""


class GpuProfile(ProfileFile):
    """One measurement: each layer on one of ``tensor`` GPUs that share it, their all-reduces included."""

    gpu_type: str


class GpuProfiles:
    """Measurements of one model.

    Args:
        measured: layers by GPU type, tensor degree and microbatch size.

    Raises:
        PlanningError: they are of models with different numbers of layers.
    """

    def __init__(self, measured: Mapping[Key, tuple[ProfiledLayer, ...]]) -> None:
        self.measured = measured
        counts = {len(layers): key for key, layers in measured.items()}
        if len(counts) > 1:
            each = "; ".join(f"{count} of {_text(key)}" for count, key in sorted(counts.items()))
            raise PlanningError(
                f"profiles have different numbers of layers: {each}. To fix: give one model's"
            )
        self.layers = next(iter(counts), 0)
        self.sums = functools.lru_cache(maxsize=None)(self._sums)

    def check(self, gpu_types: Iterable[str], layers: int) -> None:
        """Refuse profiles that are not of the cluster's GPUs, or of another model.

        Raises:
            PlanningError: says which type or number of layers, and what to change.
        """
        known = sorted({gpu_type for gpu_type, _, _ in self.measured})
        for gpu_type in gpu_types:
            if gpu_type not in known:
                raise PlanningError(
                    f"no profile is of GPU type {gpu_type}, only of {', '.join(known)}. To fix: give its "
                    "profile, or name the cluster's type as the profile does"
                )
        if layers != self.layers:
            raise PlanningError(
                f"the profiles have {self.layers} layers, the model {layers}. To fix: give one model's"
            )

    def speed(self, gpu_type: str) -> float:
        """Samples a second of one of its GPUs, where it is fastest: to order types, no more."""
        return max(
            size / tensor / max(float(self._seconds((gpu_type, tensor, size))[:2].sum()), 1e-12)
            for kind, tensor, size in self.measured
            if kind == gpu_type
        )

    def require(self, gpu_types: Iterable[str], tensor: int, size: int) -> None:
        """Refuse degrees at which a type was not measured.

        Raises:
            PlanningError: lists those at which it was.
        """
        for gpu_type in gpu_types:
            if (gpu_type, tensor, size) not in self.measured:
                known = sorted((t, b) for kind, t, b in self.measured if kind == gpu_type)
                listed = ", ".join(f"{t} x {b}" for t, b in known)
                raise PlanningError(
                    f"GPU type {gpu_type} was not profiled at tensor degree {tensor}, microbatch {size}, "
                    f"only at {listed} (degree x samples). To fix: profile it, or plan with one of these"
                )

    def rows(self, tensor: int, size: int) -> tuple[ProfiledLayer, ...] | None:
        """Layers with measured bytes at these degrees, the largest of all types; None: there are none."""
        each = [rows for (_, t, b), rows in self.measured.items() if (t, b) == (tensor, size)]
        if not any(row.held_bytes for rows in each for row in rows):
            return None
        names = [name for name in ProfiledLayer.model_fields if name.endswith("_bytes")]
        return tuple(
            layers[0].replace(**{name: max(getattr(row, name) or 0.0 for row in layers) for name in names})
            for layers in zip(*each, strict=True)
        )

    def _sums(self, gpu_type: str, tensor: int, size: int) -> np.ndarray | None:
        """Seconds of forward, backward and update of the first layers, shape (3, L + 1); None: not measured.

        A smaller microbatch takes no longer than a larger one: where it was measured so, the larger counts.
        """
        if (gpu_type, tensor, size) not in self.measured:
            return None
        seconds = self._seconds((gpu_type, tensor, size))
        for kind, degree, larger in self.measured:
            if (kind, degree) == (gpu_type, tensor) and larger > size:
                seconds[:2] = np.minimum(seconds[:2], self._seconds((kind, degree, larger))[:2])
        return sums_of(seconds)

    def _seconds(self, key: Key) -> np.ndarray:
        rows = self.measured[key]
        each = [(row.forward_seconds, row.backward_seconds, row.optimizer_seconds) for row in rows]
        return np.array(each, dtype=float).T


def read_gpu_profiles(stem: str, value: Any) -> dict[Key, tuple[ProfiledLayer, ...]]:
    """The measurements of one file.

    ``stem``: the file's name without its ending, which tells the GPU type in Sailor's form.

    Raises:
        ContractError: it is none; the field, the value and what to change.
    """
    if isinstance(value, Mapping) and any(str(key).isdigit() for key in value):
        return _sailor(stem.rpartition("_")[2], value)
    found: dict[Key, tuple[ProfiledLayer, ...]] = {}
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        one = decode(GpuProfile, item)
        if not one.layers:
            raise ContractError(Problem(f"{number}.layerSeconds", "a report's are of a step: give layers"))
        key = (one.gpu_type, one.tensor, one.microbatch_size)
        if key in found:
            raise ContractError(Problem(f"{number}", f"{_text(key)} is there twice: give each once"))
        found[key] = one.each_layer(1)
    return found


def _sailor(gpu_type: str, value: Any) -> dict[Key, tuple[ProfiledLayer, ...]]:
    found: dict[Key, tuple[ProfiledLayer, ...]] = {}
    for size, by_degree in decode(dict[_Degree, dict[_Degree, dict[_Layer, _Row]]], value).items():
        for tensor, rows in by_degree.items():
            by_layer = {int(layer): row for layer, row in rows.items()}
            missing = set(range(len(rows))) - set(by_layer)
            if missing:
                reason = f"layer {min(missing)} of {len(rows)} is missing. To fix: number all from 0"
                raise ContractError(Problem(f"{size}.{tensor}", reason))
            found[gpu_type, int(tensor), int(size)] = tuple(
                ProfiledLayer(forward_seconds=forward, backward_seconds=backward, optimizer_seconds=update)
                for forward, backward, update in (by_layer[layer] for layer in range(len(rows)))
            )
    return found


def _text(key: Key) -> str:
    return f"{key[0]} at tensor degree {key[1]}, microbatch {key[2]}"
