"""Operators that live as long as they are told: forked from one warm process, killed by SIGKILL.

Started by the tests as a program of its own.  Each line on standard input is JSON
``{"id", "dieAfter", "kubeconfig", "namespace"}``: fork an operator that kills itself with SIGKILL right
after the so many-th write that matters (TrainingJob, Pod, ConfigMap), or lives (null).  A line
``{"id", "stop": true}`` ends it with SIGTERM.  Each end is told on standard output: ``{"id", "code"}``.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

from ballast_operator.app import Operator, Options
from ballast_operator.kube.client import Cluster
from ballast_operator.settings import JobSettings, LeaderSettings, Settings, SolverSettings

COUNTED = ("TrainingJob", "Pod", "ConfigMap")
"""Kinds whose writes carry the state; Events, roles and the policy's status follow from it."""

SETTINGS = Settings(
    leader=LeaderSettings(lease_seconds=6.0, renew_seconds=1.5, fence_seconds=5.0),
    job=JobSettings(progress_seconds=1.0),
    solver=SolverSettings(retry_seconds=2.0),
)


def live(order: dict[str, Any]) -> None:
    """Be an operator; never returns."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import logging

    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    left = order["dieAfter"]
    write = Cluster._write

    async def counted(self: Cluster, verb: str, kind: Any, path: str, **arguments: Any) -> Any:
        nonlocal left
        result = await write(self, verb, kind, path, **arguments)
        if left is not None and kind.kind in COUNTED:
            left -= 1
            if left == 0:
                os.write(2, f"SIGKILL after {verb} {path}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    Cluster._write = counted  # type: ignore[method-assign]
    options = Options(
        kubeconfig=order["kubeconfig"],
        lease_namespace=order["namespace"],
        health_host="127.0.0.1",
        health_port=0,
    )

    async def run() -> None:
        await Operator(options, SETTINGS).run()

    asyncio.run(run())
    os._exit(0)


def main() -> None:
    """Serve orders until standard input ends, then end everybody."""
    children: dict[str, int] = {}

    def mourn(name: str, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        children.pop(name, None)
        sys.stdout.write(json.dumps({"id": name, "code": os.waitstatus_to_exitcode(status)}) + "\n")
        sys.stdout.flush()

    for line in sys.stdin:
        order = json.loads(line)
        if order.get("stop"):
            if order["id"] in children:
                os.kill(children[order["id"]], signal.SIGTERM)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                live(order)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children[order["id"]] = pid
        threading.Thread(target=mourn, args=(order["id"], pid), daemon=True).start()
    for pid in list(children.values()):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
