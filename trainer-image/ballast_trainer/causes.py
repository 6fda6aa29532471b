"""One-line causes of errors, in the words of the user's own code."""

import errno
import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast_trainer.errors import TrainerError

if TYPE_CHECKING:
    import torch

_OURS = Path(__file__).parent

SAMPLE_NOTE = "sample "
LAYER_NOTE = "in layer "
EVALUATION_NOTE = "in an evaluation"
GIVEN_NOTE = "given "
RECEIVED_NOTE = "received "
OPTIMIZER_NOTE = "in a step of training.optimizer"
_OF_DATA = "To fix: data.name and model.args that suit each other, e.g. a vocabulary that has every token"
_OF_LAYER = "To fix: the code or the arguments of that layer, or of the one whose output it received"

_SHORTAGES = {
    os.strerror(errno.EMFILE): "open no more files and connections. To fix: a larger limit (ulimit -n)",
    os.strerror(errno.ENOMEM): "get no more memory. To fix: more of it, or a larger limit (ulimit -v)",
    # Of other calls it is part of a longer text.
    rf"^(\[Errno \d+\] )?{os.strerror(errno.EAGAIN)}$|can't start new thread": "start no more threads or "
    "processes. To fix: a larger limit of them (ulimit -u, or the container's), or more memory (ulimit -v)",
    # torch.compile's errors quote all that the compiler was given.
    r"No working C\+\+ compiler|Python\.h: No such file": "compile no layers. To fix: an image with g++ and "
    "Python's headers, as trainer-dev has them, or training.compile: false",
}
"""Errors of the system, which have no type of their own where torch raises them: of what there is no more."""

_MAY_BE_THE_DATA = (IndexError, TypeError, RuntimeError)
_TOLD = (LAYER_NOTE, EVALUATION_NOTE, GIVEN_NOTE, RECEIVED_NOTE, OPTIMIZER_NOTE)
"""Beginnings of the notes that users are told."""


def explains_itself(error: BaseException) -> bool:
    """True if the error's text is sufficient for the user; other errors need the traceback."""
    if not isinstance(error, TrainerError):
        return shortage(error) is not None and not notes_of(error)
    cause = error.__cause__ if error.shows_cause else None
    return cause is None or "To fix: " in str(cause)


def describe(error: BaseException) -> str:
    """The error as text: its class where the text alone is unclear, its layer, and its cause."""
    if isinstance(error, TrainerError):
        return str(error)
    notes = [note for note in notes_of(error) if note.startswith(_TOLD)]
    place = f" ({', '.join(notes)})" if notes else ""
    origin = f", from {_named(error.__cause__)}" if error.__cause__ is not None else ""
    text = f"{_named(error)}{place}{origin}"
    if lacks := shortage(error):
        return f"{text}. This rank can {lacks}"
    if any(note.startswith(GIVEN_NOTE) for note in notes):
        return f"{text}. {_OF_DATA}"
    in_layer = any(note.startswith(LAYER_NOTE) for note in notes) and not _of_memory(error)
    return f"{text}. {_OF_LAYER}" if in_layer else text


def shortage(error: BaseException) -> str | None:
    """Resource that the system has no more of for this process, and what to change; None: another error."""
    found = (said for pattern, said in _SHORTAGES.items() if re.search(pattern, str(error)))
    return next(found, None) if isinstance(error, RuntimeError | OSError) else None


def notes_of(error: BaseException) -> list[str]:
    """Notes that were added to the error."""
    return list(getattr(error, "__notes__", ()))


def note_layer(error: BaseException, layer: int, kind: str) -> None:
    """Note the layer that an error came from; of layers within layers the innermost counts."""
    if not any(note.startswith(LAYER_NOTE) for note in notes_of(error)):
        error.add_note(f"{LAYER_NOTE}{layer}, {kind}")


def note_given(error: BaseException, **tensors: Any) -> None:
    """Note what a layer or the loss was given of the user's data: types, shapes and ranges, by name."""
    # Torch's losses raise a ValueError for targets of another shape; a layer's own says what it wants.
    kinds = (*_MAY_BE_THE_DATA, ValueError) if "targets" in tensors else _MAY_BE_THE_DATA
    if isinstance(error, kinds) and not _of_memory(error):
        error.add_note(
            GIVEN_NOTE + " and ".join(f"{name} {_shown(value)}" for name, value in tensors.items())
        )


def note_input(error: BaseException, layer: int, value: Any) -> None:
    """Note what a layer was given: the first one the user's data, another what the one before it returned."""
    if layer == 0:
        note_given(error, inputs=value)
    elif not _of_memory(error):
        error.add_note(f"{RECEIVED_NOTE}{_shown(value)}")


def _of_memory(error: BaseException) -> bool:
    return "OutOfMemory" in type(error).__name__


def _shown(value: Any) -> str:
    # A pod's own process waits for the fork of its trainer and has no torch.
    from ballast_trainer.trees import tensors_of

    tensors = tensors_of(value)
    text = ", ".join(map(_shown_tensor, tensors))
    return text if tensors[0] is value else f"{type(value).__name__} of {text}"


def _shown_tensor(tensor: "torch.Tensor") -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    try:
        return f"{text} from {tensor.min().item():.6g} to {tensor.max().item():.6g}"
    except Exception:  # it is empty, or its device has failed
        return text


def with_place(error: BaseException) -> str:
    """The error as text with the line that raised it: for users whose code failed in one of our calls."""
    samples = [f", {note}" for note in notes_of(error) if note.startswith(SAMPLE_NOTE)]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(_OURS):
        # One of our checks, or a call whose arguments do not fit.
        return str(error) if isinstance(error, TypeError | ValueError) else _named(error)
    return f"{_named(error)} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}{''.join(samples)})"


def _named(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
