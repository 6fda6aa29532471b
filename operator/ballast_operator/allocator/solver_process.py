"""The solver's own process: reads problems from standard input, writes allocations to standard output.

Run as ``python -m ballast_operator.allocator.solver_process`` by :mod:`ballast_operator.allocator.solver`
only; both ends are the same release, so frames are pickles: eight bytes of length, then the value. The
first frame out is ``"ready"``; then one answer a question, ``("ok", Allocation)`` or ``("error", text)``.
"""

import os
import pickle
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")
"""Length of the pickle that follows, in bytes."""


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
        try:
            answer: tuple[str, Any] = ("ok", allocate(policy, problem, **options))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        answers.write(encode(answer))
        answers.flush()


def main() -> None:
    """Serve on the standard streams; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
