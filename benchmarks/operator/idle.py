"""The operator with nothing to do: how soon it is ready, and what it takes then.

    python benchmarks/operator/idle.py

A real API server, a ClusterPolicy, no jobs. Ready is what /readyz says; CPU and memory are the operator's,
with its solver, beside what Kueue's manifest requests (config/components/manager/manager.yaml at 0b55724ab).
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

import aiohttp
from ballast_localcluster import LocalCluster
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_definitions,
    write_operator_kubeconfig,
)
from emulated import objects
from emulated.replicas import Replica
from kubernetes import config
from kubernetes.dynamic import DynamicClient

LIMITS = {"ready, s": 5.0, "idle, CPUs": 0.5, "memory, MiB": 512.0}


async def figures(kubeconfig: Path, log: Path, seconds: float) -> dict[str, float]:
    """Figures of one operator."""
    operator = Replica(kubeconfig, log)
    try:
        url = f"http://127.0.0.1:{await operator.port()}/readyz"
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.05)
        ready, spent = time.monotonic() - operator.started, operator.cpu_seconds()
        await asyncio.sleep(seconds / 2)  # the solver warms up
        began = operator.cpu_seconds()
        await asyncio.sleep(seconds)
        idle = (operator.cpu_seconds() - began) / seconds
        memory = operator.memory_mib()
    finally:
        operator.stop()
    return {
        "ready, s": ready,
        "ready, CPU s": spent,
        "idle, CPUs": idle,
        "memory, MiB": memory["withSolver"],
        "of the operator alone": memory["operator"],
    }


def main() -> None:
    """Print figures, and their ratio to the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-idle-")))
        cluster = stack.enter_context(LocalCluster(crds=[write_definitions(folder)]))
        with config.new_client_from_config(str(cluster.kubeconfig)) as api:
            dynamic = DynamicClient(api)
            apply_objects(dynamic, install_objects(OPERATOR_NAMESPACE))
            apply_objects(dynamic, [objects.policy()])
            account = write_operator_kubeconfig(api, cluster.kubeconfig, folder / "operator.kubeconfig")
        found = asyncio.run(figures(account, folder / "operator.log", given.seconds))
    if given.output == "json":
        print(json.dumps(found))
        return
    for name, figure in found.items():
        limit = LIMITS.get(name)
        print(f"{name:24} {figure:9.3f}" + (f"   {figure / limit:.2f} of {limit:g}" if limit else ""))


if __name__ == "__main__":
    main()
