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


Question = tuple[str | Callable[[Any], Any], Any, dict[str, Any]]
"""A policy with its problem and options, or a function with its argument."""


def preparation(*modules: str) -> Question:
    """A question that is answered once the modules are imported, so that no time limit counts that."""
    return import_all, modules, {}


def import_all(modules: tuple[str, ...]) -> None:
    """Import those of the modules that are there: the answer to what follows names what is missing."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def encode(value: Any) -> bytes:
    """A frame of the stream."""
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
        try:
            found = policy(problem) if callable(policy) else allocate(policy, problem, **options)
            answer = encode(("ok", found))
        except Exception as error:  # what users wrote may raise anything: the next question comes
            answer = encode(("error", f"{type(error).__name__}: {error}"))
        answers.write(answer)
        answers.flush()


def main() -> None:
    """Serve on the standard streams; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
