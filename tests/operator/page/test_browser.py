"""The page in a real browser: it obeys its own security policy, refreshes, and is usable by all."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ballast_operator.errors import Unreachable
from ballast_operator.kube.kinds import JOB
from ballast_operator.page.server import serving

from tests.operator.page.browser import Tab, a_tab, chromium
from tests.operator.page.world import HOSTILE, World, runs, time_of, waits
from tests.support.waiting import WAIT_SECONDS

PROGRAM = chromium()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)"),
]

AXE = os.environ.get("BALLAST_AXE", "")
"""The file axe.min.js of the npm package axe-core: checked where it is named."""

PICTURES = os.environ.get("BALLAST_PICTURES", "")
"""Folder for the pictures of the documentation."""

SCREENS = (
    "/",
    "/jobs",
    "/jobs/research/translator",
    "/jobs/research/translator/yaml",
    "/teams",
    "/decisions",
)


def lively() -> World:
    """An hour of two pools and two teams, and a job that moves its layers."""
    world, began = World(), dict[str, int]()
    moves: list[dict[str, object]] = []
    objective = {"policy": "hierarchical", "entities": {"language": {"weight": 2}, "vision": {"weight": 1}}}
    decision = {
        "chosen": "3 x v100 of pool fast",
        "nextBest": "6 x v100 of pool spot: 1.7 steps/s",
        "why": "its team is owed 10.7 GPUs and has 3; 2.1 steps/s here for 7.50 an hour",
    }

    def job(number: int, namespace: str, name: str, status: dict, **spec: object) -> None:
        since = time_of(60 * began.setdefault(name, number))
        allocation = {**status["allocation"], "since": since}
        world.job(namespace, name, {**status, "allocation": allocation}, **spec)

    for number in range(60):
        world.now += 60
        step = 40 * number
        if number % 15 == 10:
            measured = {"imbalanceBefore": 0.31, "imbalanceAfter": 0.03, "pauseMs": 61.0}
            moves = [*moves, {"time": time_of(60 * number), "step": step, **measured}]
        cut = 4 + len(moves)
        world.report("research", "translator", [(0, 0, cut), (1, cut, 9), (2, 9, 12)], step)
        steps = 1.6 + 0.1 * cut + number * 37 % 11 / 60
        speed = {"step": step, "stepsPerSecond": steps, "loss": 9.0 / (1 + number / 8)}
        told = {"progress": speed, "lastDecision": {**decision, "planId": f"round-{number // 6}"}}
        status = {**runs("fast", gpus=3, step=step, rebalances=moves), **told}
        job(number, "research", "translator", status, entity="language", totalSteps=4000)
        for other in range(4):
            turn = number // (9 + other)
            pool = ("fast", "spot")[(other + turn) % 2]
            status = runs(pool, gpus=1, step=step)
            job(number, "vision", f"sweep-{other}-{turn}", status, entity="vision", totalSteps=9000)
            if world.caches[JOB].get(("vision", f"sweep-{other}-{turn - 1}")) is not None:
                world.delete("vision", f"sweep-{other}-{turn - 1}")
        held = Counter({"fast": 0, "spot": 0})
        for item in world.caches[JOB]:
            held[item["status"]["allocation"]["pool"]] += item["status"]["allocation"]["gpus"]
        spent = [{"team": "vision", "since": time_of(0), "cost": 120.0 + number}]
        world.policy(
            held=held,
            pools=("fast", "spot"),
            round_=f"round-{number // 6}",
            objective=objective,
            budgets={"vision": {"amount": 400.0}},
            status={"teams": spent},
        )
        world.recent.work_out()
    few = "waits for 8 GPUs of pool spot: 6 of 8 are free"
    world.job("vision", "waits", waits(message=few), entity="vision")
    world.job("hostile", "texts", waits(message=HOSTILE), entity=HOSTILE)
    return world


@contextlib.asynccontextmanager
async def opened(world: World) -> AsyncIterator[tuple[Tab, str]]:
    """A tab that has logged in by the form."""
    assert PROGRAM is not None
    async with serving(world.page, host="127.0.0.1", port=0) as port, a_tab(PROGRAM) as tab:
        here = f"http://127.0.0.1:{port}"
        await tab.go(f"{here}/jobs")
        assert await tab.run("location.pathname + location.search") == "/login?to=/jobs"
        await tab.leads_on("document.querySelector('#token').value = 'good'; document.forms[0].submit()")
        assert await tab.run("location.pathname") == "/jobs"
        yield tab, here


async def eventually(tab: Tab, script: str) -> None:
    """Until an expression is true there, looked at by the browser itself."""
    ends = f"performance.now() + {1000 * WAIT_SECONDS}"
    again = "performance.now() > ends ? failed(new Error('not in time')) : requestAnimationFrame(look)"
    look = f"const ends = {ends}; const look = () => {{ {script} ? done(true) : {again}; }}; look();"
    await tab.run(f"new Promise((done, failed) => {{ {look} }})")


async def test_every_screen_keeps_to_its_own_security_policy_and_fits_a_telephone() -> None:
    """Nothing is refused or fails, in light and dark; at 400 pixels the page does not scroll sideways."""
    async with opened(lively()) as (tab, here):
        for width, dark in ((1280, False), (400, True)):
            await tab.size(width, 900, dark=dark)
            for path in (*SCREENS, "/jobs/hostile/texts"):
                await tab.go(here + path)
                assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), (path, width)
        for path in ("/", "/jobs/research/translator"):
            await tab.go(here + path)
            await eventually(tab, "document.querySelector('.curve canvas') !== null")
        assert tab.complaints == []
        assert await tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"


async def test_a_screen_refreshes_itself_until_it_is_told_not_to() -> None:
    """What has changed is there without a look at the address; where the keyboard is stays."""
    world = lively()
    async with opened(world) as (tab, here):
        await tab.go(f"{here}/jobs/vision/waits")
        await tab.run("document.querySelector('#now a').focus()")
        world.job("vision", "waits", runs("spot", gpus=8), entity="vision")
        world.now += 10
        await eventually(tab, "document.querySelector('#now').innerText.includes('8 x v100')")
        assert await tab.run("document.activeElement.getAttribute('href')") == "/jobs/vision/waits/yaml"
        await tab.run("document.querySelector('#follow').click()")
        assert await tab.run("document.querySelector('#follow').innerText") == "Refresh"
        assert tab.complaints == []


async def test_a_screen_that_failed_comes_back_by_itself() -> None:
    """Once the API server answers again, who looks sees the job, and its curve."""
    world = lively()
    reviews = world.access.namespaces

    async def fails(*_: object) -> frozenset[str]:
        raise Unreachable("connection refused")

    async with opened(world) as (tab, here):
        await tab.go(f"{here}/jobs/research/translator")
        world.access.namespaces = fails
        await eventually(tab, "document.querySelector('#now').innerText.includes('did not answer')")
        world.access.namespaces = reviews
        await eventually(tab, "document.querySelector('#now').innerText.includes('Running')")
        await eventually(tab, "document.querySelector('.curve canvas') !== null")


async def test_curves_tell_the_time_as_the_tables_do() -> None:
    """In UTC, wherever the browser is; the world's clock begins at 17:46:40."""
    async with opened(lively()) as (tab, here):
        await tab.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
        await tab.go(f"{here}/jobs/research/translator")
        await eventually(tab, "document.querySelector('.curve canvas') !== null")
        await tab.run(
            "over = document.querySelector('.u-over'), box = over.getBoundingClientRect(),"
            " at = {clientX: box.x + box.width / 2, clientY: box.y + 9}, true"
        )
        told = "document.querySelector('.u-legend .u-value').innerText"
        moved = "over.dispatchEvent(new MouseEvent('mousemove', at))"
        await eventually(tab, f"({moved}, /^2030-03-17T18:1.:40Z$/.test({told}))")


async def test_a_curve_keeps_its_pools_name() -> None:
    """Also where there is no room for the curves of all pools, and a further one is before them by name."""
    world, pools = World(), [f"pool-{number:02}" for number in range(16)]
    for names in (pools, pools, ["first", *pools]):
        world.policy(pools=names)
        world.recent.work_out()
        world.now += 60
    recent = world.recent.samples.pop()
    async with opened(world) as (tab, here):
        await tab.go(here)
        await eventually(tab, "document.querySelector('.u-legend') !== null")
        world.recent.samples.append(recent)
        await eventually(tab, "document.querySelector('.u-legend').innerText.includes('first')")


async def test_the_page_is_used_by_keyboard_alone() -> None:
    """The first key leads past the navigation; links and buttons are reached in their order, and seen."""
    async with opened(lively()) as (tab, here):
        await tab.go(here)
        await tab.press("Tab")
        assert await tab.run("document.activeElement.innerText") == "Skip to the content"
        assert await tab.run("document.activeElement.getBoundingClientRect().left >= 0")
        reached = []
        for _ in range(5):
            await tab.press("Tab")
            reached.append(await tab.run("document.activeElement.innerText"))
        assert reached == ["Cluster", "Jobs", "Teams", "Decisions", "Stop refreshing"]
        assert await tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.skipif(not Path(AXE).is_file(), reason="BALLAST_AXE names no axe.min.js (npm pack axe-core)")
async def test_axe_finds_nothing() -> None:
    """No violation of WCAG 2.2 A and AA, in light and dark."""
    axe = await asyncio.to_thread(Path(AXE).read_text) + ";0"
    async with opened(lively()) as (tab, here):
        for dark in (False, True):
            await tab.size(1280, 900, dark=dark)
            for path in (*SCREENS, "/jobs/none/none", "/login"):
                await tab.go(here + path)
                await tab.run(axe)
                found = await tab.run(
                    "axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']}).then(r =>"
                    " r.violations.map(v => v.id + ': ' + v.nodes.map(n => n.html + n.failureSummary)))"
                )
                assert found == [], (path, dark)


@pytest.mark.skipif(not PICTURES, reason="BALLAST_PICTURES names no folder for the documentation's pictures")
async def test_pictures_for_the_documentation() -> None:
    """Of each screen."""
    shown = (("cluster", "/", 900), ("jobs", "/jobs", 500), ("job", SCREENS[2], 1100))
    world = lively()
    world.delete("hostile", "texts")
    async with opened(world) as (tab, here):
        for name, path, height in (*shown, ("teams", "/teams", 600), ("decisions", "/decisions", 700)):
            await tab.size(1100, height)
            await tab.go(here + path)
            curves = "document.querySelectorAll('.curve canvas').length"
            await eventually(tab, f"{curves} === document.querySelectorAll('.curve').length")
            file = Path(PICTURES) / f"page-{name}.webp"
            await asyncio.to_thread(file.write_bytes, await tab.picture())
