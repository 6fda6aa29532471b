"""The connection that a kubeconfig describes, directly or by a proxy."""

import asyncio
import concurrent.futures
import os

import pytest
import yaml
from aiohttp import web
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import LEASE


class NoThreads(concurrent.futures.ThreadPoolExecutor):
    """Refuses all work."""

    def submit(self, *_, **__):
        raise AssertionError("a request waits for a thread")


def kubeconfig(folder, address, **cluster):
    path = folder / "kubeconfig"
    config = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": address, **cluster}}],
        "users": [{"name": "a", "user": {"token": "secret"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture
async def server():
    """(address, URLs that were asked for) of an API server, or of a proxy before it."""
    asked = []

    async def answer(request):
        asked.append(request.raw_path)
        return web.json_response({"metadata": {"name": "x"}})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_a_request_waits_for_no_thread(tmp_path, server):
    """Decisions are computed in threads: what waits for another one waits for them, too."""
    address, asked = server
    async with await connect(kubeconfig(tmp_path, address)) as cluster:
        asyncio.get_running_loop().set_default_executor(NoThreads())
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1


@pytest.mark.parametrize("of_kubeconfig", [False, True])
async def test_a_proxy_before_the_api_server(tmp_path, server, monkeypatch, of_kubeconfig):
    """The one that the kubeconfig names, else that of the environment."""
    address, asked = server
    of_environment = address.removeprefix("http://")  # curl's way to write it, too
    monkeypatch.setenv("http_proxy", "http://nowhere.invalid:1" if of_kubeconfig else of_environment)
    named = {"proxy-url": address} if of_kubeconfig else {}
    async with await connect(kubeconfig(tmp_path, "http://api.invalid:80", **named)) as cluster:
        await cluster.get(LEASE, "ns", "x")
    (url,) = asked
    assert url.startswith("http://api.invalid")


@pytest.mark.parametrize("without", ["127.0.0.1", "::/0, .svc, 127.1.2.3/8"], ids=["address", "networks"])
async def test_an_address_that_needs_no_proxy(tmp_path, server, monkeypatch, without):
    """``NO_PROXY`` is heard, as Kubernetes' own programs do."""
    address, asked = server
    monkeypatch.setenv("http_proxy", "http://nowhere.invalid:1")
    monkeypatch.setenv("no_proxy", without)
    async with await connect(kubeconfig(tmp_path, address)) as cluster:
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1


async def test_the_environments_kubeconfig_is_that_of_the_moment(tmp_path, server, monkeypatch):
    """Also one that is named after the client's modules were imported, as one of several files."""
    address, asked = server
    files = [str(tmp_path / "none"), kubeconfig(tmp_path, address)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(files))
    async with await connect() as cluster:
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1
