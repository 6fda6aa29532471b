"""A headless Chromium, driven by its debugging protocol: where one is installed."""

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program; None: there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """One tab.

    Attributes:
        complaints: what the security policy refused, errors of scripts, answers that failed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        self._loaded = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif told["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(told["params"])[:1000])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await self._answers[number]
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression there; a promise is waited for."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def go(self, address: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await self._loaded.wait()

    async def leads_on(self, script: str) -> None:
        """Run what leaves this page, and wait for the next one."""
        self._loaded.clear()
        await self.run(script)
        await self._loaded.wait()

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **text
            )

    async def picture(self) -> bytes:
        """Of what is seen, as WebP."""
        answer = await self.call("Page.captureScreenshot", format="webp", quality=70)
        return base64.b64decode(answer["data"])


@contextlib.asynccontextmanager
async def a_tab(program: str) -> AsyncIterator[Tab]:
    """A new browser with one tab; both end with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", f"--user-data-dir={folder}", "--remote-debugging-port=0"]
        process = _started([program, *flags, "about:blank"])
        try:
            assert process.stderr is not None
            port = await asyncio.to_thread(_port, process.stderr)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = json.loads(await answer.text())
                (tab,) = [each for each in tabs if each["type"] == "page"]
                address = tab["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=2**28) as socket:
                    found = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await found.call(f"{domain}.enable")
                    yield found
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate)


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def _port(log: Any) -> str:
    for line in log:
        if match := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line):
            return match[1]
    raise AssertionError("the browser has ended")
