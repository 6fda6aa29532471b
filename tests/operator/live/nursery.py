"""Operators that live as long as they are told: forked from one warm process, killed by SIGKILL.

Started by the tests as a program of its own.  Each line on standard input is JSON
``{"id", "dieAfter", "kubeconfig", "namespace", "log"}``: fork an operator that kills itself with SIGKILL
right after the ``dieAfter``-th write that matters (TrainingJob, Pod, ConfigMap), or lives (null).  A line
``{"id", "stop": true}`` ends it with SIGTERM.  Each end is told on standard output: ``{"id", "code"}``.

An operator that loses its leader's Lease ends, by design; on a busy machine it does.  As its Deployment
would, the nursery starts it again, with the writes that it had left.
"""

import asyncio
import gc
import json
import mmap
import os
import signal
import struct
import sys
import threading
import traceback
from typing import Any

from ballast_operator.allocator.saved_state import STATE_NAME
from ballast_operator.app import Operator, Options
from ballast_operator.errors import NotLeader
from ballast_operator.kube.client import Cluster
from ballast_operator.settings import JobSettings, LeaderSettings, Settings, SolverSettings

COUNTED = ("TrainingJob", "Pod", "ConfigMap")
"""Kinds whose writes carry the state of a job; Events, roles and the policy's status follow from it.

The accounts of rounds do not: whether they are saved before a job's first write or after it is chance.
"""

SETTINGS = Settings(
    leader=LeaderSettings(lease_seconds=10.0, renew_seconds=2.0, fence_seconds=8.0),
    job=JobSettings(progress_seconds=1.0, renew_seconds=1.0, ask_again_seconds=2.0, kueue=True),
    solver=SolverSettings(retry_seconds=2.0),
)


LEASE_LOST = os.EX_TEMPFAIL
"""Exit code of an operator that has lost its leader's Lease."""


class Countdown:
    """How many writes are left, in memory that successive processes share; -1: without end."""

    def __init__(self, left: int | None) -> None:
        self._memory = mmap.mmap(-1, 8)
        self._set(-1 if left is None else left)

    def is_over(self) -> bool:
        """Count one write; whether it was the last."""
        (left,) = struct.unpack("q", self._memory[:8])
        if left > 0:
            self._set(left - 1)
        return left == 1

    def _set(self, left: int) -> None:
        self._memory[:8] = struct.pack("q", left)


def live(order: dict[str, Any], countdown: Countdown) -> None:
    """Be an operator; never returns."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import logging

    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(message)s")
    write = Cluster._write

    async def counted(self: Cluster, verb: str, kind: Any, path: str, *sent: Any, **how: Any) -> Any:
        result = await write(self, verb, kind, path, *sent, **how)
        if kind.kind in COUNTED and not path.endswith(STATE_NAME) and countdown.is_over():
            os.write(2, f"SIGKILL after {verb} {path}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Cluster._write = counted  # type: ignore[method-assign]
    options = Options(
        kubeconfig=order["kubeconfig"],
        lease_namespace=order["namespace"],
        health_host="127.0.0.1",
        health_port=0,
        history=order["history"],
    )

    async def run() -> None:
        await Operator(options, SETTINGS).run()

    asyncio.run(run())
    os._exit(0)


def main() -> None:
    """Serve orders until standard input ends, then kill what is left."""
    children: dict[str, int] = {}
    stopping: set[str] = set()

    def start(order: dict[str, Any], countdown: Countdown) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            live(order, countdown)
        except NotLeader:
            traceback.print_exc()
            os._exit(LEASE_LOST)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def see_through(order: dict[str, Any]) -> None:
        name, countdown = order["id"], Countdown(order["dieAfter"])
        while True:
            with lock:
                if name in stopping:
                    code = 0
                    break
                pid = children[name] = start(order, countdown)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            with lock:
                del children[name]
            if code != LEASE_LOST:
                break
        sys.stdout.write(json.dumps({"id": name, "code": code}) + "\n")
        sys.stdout.flush()

    lock = threading.Lock()
    # An operator's search for garbage would copy all that this process has imported.
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("stop"):
            with lock:
                stopping.add(order["id"])
                if order["id"] in children:
                    os.kill(children[order["id"]], signal.SIGTERM)
            continue
        threading.Thread(target=see_through, args=(order,), daemon=True).start()
    with lock:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
