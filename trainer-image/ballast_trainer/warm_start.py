"""Warm start: forks of a process with torch imported, for the pods of one machine.

Importing torch costs seconds of CPU and half a gigabyte per process.  On a real node a pod pays
that once; a laptop that runs a whole cluster of pods pays it for each.  ``python -m
ballast_trainer.warm_start SOCKET`` imports torch and listens; a ``ballast-train pod`` with
``BALLAST_WARM_START=SOCKET`` in its environment hands over its arguments, environment, working
directory and standard streams, passes on SIGTERM, and ends as the fork ends.  The fork has a session of its
own, which is killed when the pod's own process is gone, and when the fork has ended.  Where nothing
listens, or the pod's environment differs in variables that torch reads at import, the pod starts as usual.
"""

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_trainer.process_exit import end_with_parent

WARM_START_ENV = "BALLAST_WARM_START"
"""Path of the socket; set by the runner of the pods. Missing: a pod imports torch itself."""
COMMAND_LINE = "ballast_trainer.cli.main:main"
"""Function that forks run, by name: this module is below the command line, which uses it."""
_REQUEST_BYTES = 4 << 20
_CONNECT_SECONDS = 5.0
_IMPORT_SECONDS = 120.0
"""Seconds that a pod waits for a server that is still importing; its own import would take no less."""
_READ_BY_IMPORTS = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA_")
"""Variables with these prefixes have had their effect when the server forks."""


def start_warm(environment: Mapping[str, str]) -> int | None:
    """Run this very command in a fork of the server; the exit code, or None where nothing listens."""
    path = environment.get(WARM_START_ENV)
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_CONNECT_SECONDS)
    request = {"arguments": sys.argv[1:], "environment": dict(environment), "folder": os.fspath(Path.cwd())}
    data = json.dumps(request).encode()
    pending: list[int] = []
    # A SIGTERM that comes before the fork is known is passed on then.
    signal.signal(signal.SIGTERM, lambda number, frame: pending.append(number))
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        connection.connect(path)
        socket.send_fds(connection, [data], [0, 1, 2])
        connection.settimeout(_IMPORT_SECONDS)
        child = int(connection.recv(64))
    except (OSError, ValueError):
        connection.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if pending:
            os.kill(os.getpid(), signal.SIGTERM)
        return None
    connection.settimeout(None)

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    if pending:
        pass_on(signal.SIGTERM, None)
    answer = connection.recv(64)
    if not answer:
        return 128 + signal.SIGKILL
    code = int(answer)
    return 128 - code if code < 0 else code


class WarmStartServer:
    """Forks a process per connection to a socket; it calls the command line with the arguments it is sent."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._children: dict[int, socket.socket] = {}
        # Taken before the imports, which set further variables.
        self._import_environment = _import_environment(os.environ)

    def serve(self) -> None:
        """Serve until killed."""
        wake, wakened = os.pipe()
        for end in (wake, wakened):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakened)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._fork(connection, (wake, wakened))
                elif key.fileobj == wake:
                    os.read(wake, 4096)
                    self._reap()
                else:
                    self._client_gone(key.data)

    def _fork(self, connection: socket.socket, pipes: tuple[int, int]) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _REQUEST_BYTES)
        data, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        request = _request_of(data) if len(streams) == 3 else {}
        if _import_environment(request.get("environment", {})) != self._import_environment:
            for stream in streams:
                os.close(stream)
            connection.close()
            return
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._listener, connection, *self._children.values()):
                other.close()
            for end in pipes:
                os.close(end)
            self._selector.close()
            _become(request, streams, parent)
        for stream in streams:
            os.close(stream)
        self._children[child] = connection
        self._selector.register(connection, selectors.EVENT_READ, child)
        with contextlib.suppress(OSError):
            connection.send(str(child).encode())

    def _reap(self) -> None:
        for child in list(self._children):
            # The zombie keeps the group's id from being reused until the rest of the group is killed.
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(child)
                _, status = os.waitpid(child, 0)
                connection = self._children.pop(child)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()

    def _client_gone(self, child: int) -> None:
        if child not in self._children:
            return
        with contextlib.suppress(ConnectionResetError):  # it was killed with an answer unread
            if self._children[child].recv(64):
                return
        _kill_group(child)
        # Its connection is closed; only the fork is left to be reaped.
        self._selector.unregister(self._children[child])


def _request_of(data: bytes) -> dict[str, Any]:
    """Request of a process; empty where it is none: the process starts as usual then."""
    # Imported by the server alone: what asks for a fork stays light.
    from ballast_policies.contract.decode import parse_json
    from ballast_policies.contract.errors import ContractError

    try:
        found = parse_json(data.decode())
    except (ContractError, UnicodeDecodeError):
        return {}
    environment = found.get("environment") if isinstance(found, dict) else None
    return found if isinstance(environment, dict) else {}


def _import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}


def _kill_group(child: int) -> None:
    """Kill a fork and its process group; a fork without its own group yet is killed alone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _become(request: dict[str, object], streams: list[int], parent: int) -> None:
    end_with_parent(parent)
    os.setsid()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.environ.pop(WARM_START_ENV, None)
    os.chdir(str(request["folder"]))
    tempfile.tempdir = None
    sys.argv[1:] = [str(argument) for argument in request["arguments"]]  # type: ignore[attr-defined]
    module, _, attribute = COMMAND_LINE.partition(":")
    code = 1
    try:
        getattr(importlib.import_module(module), attribute)(sys.argv[1:])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Listen on the socket named by the first argument, import torch, then serve."""
    server = WarmStartServer(sys.argv[1])
    for module in ("ballast_trainer.cli.pod", "torch.distributed.checkpoint", "ballast_trainer.preload"):
        importlib.import_module(module)
    server.serve()


if __name__ == "__main__":
    main()
