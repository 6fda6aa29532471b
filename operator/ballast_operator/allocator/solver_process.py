"""The solver's own process: reads questions from standard input, writes answers to standard output.

Run as ``python -m ballast_operator.allocator.solver_process``, by ``solver.py`` beside it only; both
ends are the same release, so frames are pickles: eight bytes of length, then the value. The first frame out
is ``"ready"``; then one answer a question, ``("ok", Allocation)`` or ``("error", text)``. A question is a
problem with its policy, or a function with its argument, which is called: its answer is the value.
A policy named ``module:function`` is imported and called here, never in the operator's own process.
"""

import contextlib
import importlib
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")
"""Length of the pickle that follows, in bytes."""


def preparation(*modules: str) -> tuple[None, tuple[str, ...], dict[str, Any]]:
    """A question that is answered once the modules are imported, so that no time limit counts that."""
    return None, modules, {}


def encode(value: Any) -> bytes:
    """One frame."""
    body = pickle.dumps(value)
    return HEADER.pack(len(body)) + body


def _read(stream: BinaryIO) -> Any | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    from ballast_policies.allocation.registry import allocate

    answers.write(encode("ready"))
    answers.flush()
    while (question := _read(questions)) is not None:
        policy, problem, options = question
        if policy is None:
            answers.write(encode(_prepared(problem)))
            answers.flush()
            continue
        if callable(policy):
            answers.write(_called(policy, problem))
            answers.flush()
            continue
        try:
            answer: tuple[str, Any] = ("ok", allocate(policy, problem, **options))
        except Exception as error:  # also a user's own policy may raise anything: the next question comes
            answer = ("error", f"{type(error).__name__}: {error}")
        answers.write(encode(answer))
        answers.flush()


def _called(function: Callable[[Any], Any], argument: Any) -> bytes:
    try:
        return encode(("ok", function(argument)))
    except Exception as error:  # of what users wrote, nested however deep: the next question comes
        return encode(("error", f"{type(error).__name__}: {error}"))


def _prepared(modules: tuple[str, ...]) -> tuple[str, Any]:
    for module in modules:
        # The answer to the question that follows names what is missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return "ok", None


def main() -> None:
    """Serve on the standard streams; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
