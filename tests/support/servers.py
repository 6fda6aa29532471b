"""HTTP servers in the test's own process, and kubeconfigs that lead there."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Answer = Callable[[Any], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def served(answer: Answer, **how: Any) -> AsyncIterator[str]:
    """Address of a server that gives ``answer`` to every request; ``how``: of aiohttp's runner."""
    runner = web.ServerRunner(web.Server(answer), **how)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def a_kubeconfig(path: Path, address: str, user: dict[str, Any] | None = None, **cluster: Any) -> str:
    """Path of a new kubeconfig with one context; ``cluster``: further fields of its cluster."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": address, **cluster}}],
        "users": [{"name": "a", "user": user or {}}],
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)
