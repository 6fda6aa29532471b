"""The page, asked over HTTP: what each screen shows, to whom, and what it never lets through."""

import asyncio
import contextlib
import html
import re
from collections.abc import AsyncIterator

import pytest
from aiohttp import CookieJar
from aiohttp.test_utils import TestClient, TestServer
from ballast_operator import listening
from ballast_operator.api.job_allocation import coming_node
from ballast_operator.errors import Unreachable
from ballast_operator.history.recording import JobRecord
from ballast_operator.kube.kinds import JOB
from ballast_operator.page.access import OneKey
from ballast_operator.page.server import COOKIE, HEADERS, Page, serving

from tests.operator.page.world import HOSTILE, NOW, Everybody, World, runs, time_of, waits

LOGIN = {"token": "good", "to": "/"}


@contextlib.asynccontextmanager
async def looked_at(world: World, *, login: bool = True) -> AsyncIterator[TestClient]:
    jar = CookieJar(unsafe=True)
    async with TestClient(TestServer(world.page.application), cookie_jar=jar) as client:
        if login:
            assert (await client.post("/login", data=LOGIN)).status == 200
        yield client


async def text_of(client: TestClient, path: str, status: int = 200) -> str:
    async with client.get(path) as answer:
        text = await answer.text()
        assert answer.status == status, text
        assert HEADERS.items() <= dict(answer.headers).items()
        return text


def plain(html: str) -> str:
    """Its words, without markup."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


SCREENS = ("/", "/jobs", "/jobs/team/one", "/jobs/team/one/yaml", "/teams", "/decisions")


async def test_nobody_sees_anything_without_a_token():
    """Each screen leads to the login, each number is refused; a wrong token is told so."""
    world = World()
    world.policy()
    world.job("team", "one", runs())
    async with looked_at(world, login=False) as client:
        for path in SCREENS:
            async with client.get(path, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"].partition("?")[0]) == (303, "/login")
                assert HEADERS.items() <= dict(answer.headers).items()
        for path in ("/cluster/curves.json", "/jobs/team/one/curves.json"):
            await text_of(client, path, 401)
        async with client.post("/login", data={"token": "bad"}) as answer:
            assert answer.status == 401
            assert "does not know this token" in await answer.text()
        for scheme, status in (("Bearer", 401), ("Basic", 303)):  # the other is a proxy's own
            headers = {"Authorization": f"{scheme} bad"}
            async with client.get("/jobs", headers=headers, allow_redirects=False) as answer:
                assert answer.status == status


async def test_a_login_is_a_cookie_that_no_script_and_no_other_site_has():
    """HttpOnly, SameSite=Strict, without the token; behind TLS, for TLS alone; logging out ends it."""
    world = World()
    async with looked_at(world, login=False) as client:
        for proto, secure in (("http", False), ("https", True)):
            answer = await client.post(
                "/login", data=LOGIN, headers={"X-Forwarded-Proto": proto}, allow_redirects=False
            )
            said = answer.headers["Set-Cookie"]
            assert "HttpOnly" in said and "SameSite=Strict" in said and "good" not in said
            assert ("Secure" in said) is secure
        client.session.cookie_jar.clear()
        await client.post("/login", data=LOGIN)
        session = {cookie.key: cookie.value for cookie in client.session.cookie_jar}[COOKIE]
        await text_of(client, "/jobs")
        await client.post("/logout")
        async with client.get(
            "/jobs", headers={"Cookie": f"{COOKIE}={session}"}, allow_redirects=False
        ) as answer:
            assert answer.status == 303


@pytest.mark.parametrize(
    "to", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)"]
)
async def test_a_login_leads_to_this_page_alone(to: str):
    """Wherever an address says that it should lead."""
    async with looked_at(World(), login=False) as client:
        answer = await client.post("/login", data={"token": "good", "to": to}, allow_redirects=False)
        assert answer.headers["Location"] == "/"


async def test_a_login_leads_to_the_screen_and_filter_that_was_asked_for():
    """As a dashboard's link has them."""
    world = World()
    world.job("team", "one", waits())
    async with looked_at(world, login=False) as client:
        form = await text_of(client, "/jobs?state=Running&text=%C3%A4+b%26c")
        (to,) = re.findall(r'name="to" value="([^"]*)"', form)
        async with client.post("/login", data={"token": "good", "to": html.unescape(to)}) as answer:
            assert answer.url.query == {"state": "Running", "text": "\u00e4 b&c"}
            assert "No job is like that" in await answer.text()


async def test_a_form_of_another_site_is_refused():
    """A browser says where it comes from."""
    async with looked_at(World(), login=False) as client:
        answer = await client.post("/login", data=LOGIN, headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status == 403
        assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "multipart/form-data; boundary=b"},
        {"Content-Type": "application/x-www-form-urlencoded; charset=none"},
        {"Content-Type": "application/x-www-form-urlencoded", "Content-Encoding": "gzip"},
    ],
)
@pytest.mark.parametrize("content", [b"token=a", b"--b\r\n\xff\xfe\r\n"])
async def test_what_is_no_form_is_a_bad_request(headers, content):
    """Not a failure of the page, with what it failed at in the operator's log."""
    async with looked_at(World(), login=False) as client:
        answer = await client.post("/login", data=content, headers=headers)
        assert answer.status == 400 and "no form of this page" in await answer.text()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01 of TLS\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /login HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Encoding: br\r\n\r\nx", 400),
        (
            b"POST /none HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nContent-Encoding: gzip\r\n\r\nnot gzip.",
            303,
        ),
    ],
    ids=["TLS", "version", "long", "brotli", "gzip"],
)
async def test_what_is_no_request_is_answered_and_no_error_in_the_log(sent, status, caplog):
    """Anybody can send it, as often as they like; an error of the operator's own is one still."""
    async with serving(World().page, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert int((await reader.readline()).split()[1]) == status
        assert await reader.read()
        writer.close()
    assert not caplog.records
    listening.logger.error("of ours", exc_info=ValueError())
    assert [record.getMessage() for record in caplog.records] == ["of ours"]


async def test_of_very_many_connections_the_oldest_are_closed(monkeypatch):
    """Who begins requests and does not end them takes no place from others."""
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(listening, "LOOK_SECONDS", 0.01)
    async with serving(World().page, host="127.0.0.1", port=0) as port:
        begun = []
        for _ in range(10):
            begun.append(await asyncio.open_connection("127.0.0.1", port))
            begun[-1][1].write(b"GET /login HTTP/1.1\r\nHost: page\r\n")
        for reader, _ in begun[:6]:
            assert await reader.read() == b""
        begun[-1][1].write(b"\r\n")
        assert await begun[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in begun:
            writer.close()


async def test_the_cluster_shows_pools_prices_hazard_and_who_ran_where():
    """GPUs that train, that are held otherwise, and that are free; by pool and by type."""
    world = World()
    world.policy(held=3, pools=("fast", "slow"))
    world.job("team", "one", runs())
    world.job("team", "two", {**runs(gpus=1), "state": "Starting"})
    world.job("team", "three", waits())
    world.job("team", "four", {})
    async with looked_at(world) as client:
        screen = await text_of(client, "/")
        words = plain(screen)
    assert "fast v100 , spot 2 8 2 1 5 training: 25.0 %" in words
    assert "free: 62.5 % free 2.50 0.04 (0.01 to 0.2)" in words
    assert "v100 4 16 2 4 10" in words  # three of `slow` are held by pods of jobs that are gone
    assert "4 jobs: 1 New , 1 Waiting , 1 Starting , 1 Running . Waiting: 1 WaitingForCapacity" in words
    assert "team/one: 2 GPUs of fast, launch 1, 10 min" in screen


async def test_two_jobs_on_one_gpu_take_one_and_a_node_to_come_takes_none():
    """Of the GPUs that there are; the job that trains there counts, not the one that ends."""
    world = World()
    world.policy(held=1)
    for name, state in (("ends", "Stopping"), ("trains", "Running")):
        status = {**runs(gpus=1), "state": state}
        status["allocation"]["sharedGpu"] = {"partner": "team/other"}
        world.job("team", name, status)
    grows = {**runs(gpus=2), "state": "Starting"}
    grows["allocation"]["nodes"] = [coming_node("fast", 0), coming_node("fast", 1)]
    world.job("team", "grows", grows)
    async with looked_at(world) as client:
        assert "fast v100 , spot 2 8 1 0 7 training: 12.5 %" in plain(await text_of(client, "/"))


async def test_jobs_are_filtered_and_paged():
    """By namespace, state, reason, pool and name; a page beyond the last is the last."""
    world = World()
    for number in range(130):
        world.job("many", f"job-{number:03}", waits())
    world.job("team", "one", runs())
    world.job("team", "held", waits("BudgetExhausted"))
    async with looked_at(world) as client:

        async def listed(query: str) -> tuple[list[str], str]:
            screen = await text_of(client, f"/jobs?{query}")
            return re.findall(r'<th scope="row"><a href="/jobs/([^"]*)"', screen), plain(screen)

        names, words = await listed("")
        assert len(names) == 100 and "1 to 100 of 132 jobs" in words and "page 1 of 2" in words
        names, words = await listed("page=999")
        assert len(names) == 32 and "101 to 132 of 132" in words
        assert (await listed("namespace=team"))[0] == ["team/held", "team/one"]
        assert (await listed("state=Running"))[0] == ["team/one"]
        assert (await listed("reason=BudgetExhausted"))[0] == ["team/held"]
        assert (await listed("pool=fast"))[0] == ["team/one"]
        assert (await listed("text=JOB-12"))[0] == [f"many/job-{number}" for number in range(120, 130)]
        assert (await listed("namespace=none&page=%FF"))[1].count("No job is like that") == 1
        for name in ("namespace", "state", "reason"):  # what is asked for is also what is shown as chosen
            assert "<option selected>Nonsense</option>" in await text_of(client, f"/jobs?{name}=Nonsense")


async def test_a_job_shows_its_life_its_layers_its_cost_and_why():
    """A launch, a move of layers, a growth, an end, each at its time; where layers were before and after."""
    world = World()
    world.policy()
    world.job("team", "one", runs())
    world.report("team", "one", [(0, 0, 3), (1, 3, 8)])
    world.recent.work_out()
    world.now += 30
    world.report("team", "one", [(0, 0, 5), (1, 5, 8)], step=50)
    moved = {"time": time_of(20), "step": 50, "launch": 1, "imbalanceBefore": 0.3, "pauseMs": 12.0}
    for measured in ({}, {"imbalanceAfter": 0.04}):
        moved |= measured
        world.job("team", "one", runs(step=50, rebalances=[dict(moved)]))
        world.recent.work_out()
    world.now += 30
    paid = [{"pool": "fast", "gpuType": "v100", "gpuSeconds": 3600.0 * 12_345.6, "cost": 12.5}]
    world.job("team", "one", runs(gpus=4, step=60, rebalances=[moved], poolCosts=paid))
    world.recent.work_out()
    async with looked_at(world) as client:
        screen = await text_of(client, "/jobs/team/one")
        curves = await (await client.get("/jobs/team/one/curves.json")).json()
        stored = await text_of(client, "/jobs/team/one/yaml")
    words = plain(screen)
    assert "so far for 12,346 GPU hours" in words
    for told in (
        "Launched launch 1 on 2 x v100 of pool fast",
        "LayersMoved at step 50: imbalance 30% to 4%, pause 12 ms",
        "Grown from 2 to 4 GPUs",
        "next best 4 x k80: 1 steps/s",
        "its share is 57 %",
    ):
        assert told in words
    assert words.count("LayersMoved") == 1
    assert re.findall(r"rank (\d): layers ([\d-]+)", screen) == [
        ("0", "0-2"),
        ("1", "3-7"),
        ("0", "0-4"),
        ("1", "5-7"),
    ]
    assert curves["data"][0] == [world.now - 60, world.now - 30, world.now]
    assert curves["data"][2] == [2.0, 2.0, 2.0]
    assert "totalSteps: 100" in plain(stored)


async def test_what_happened_to_a_job_and_in_a_round_has_its_time_and_order_at_the_first_look():
    """A replica that begins sees jobs that were admitted, moved and asked to stop long before."""
    world = World()
    moved = {"time": time_of(-300), "step": 5, "launch": 1, "imbalanceBefore": 0.3, "imbalanceAfter": 0.1}
    for name, minutes in (("old", 180), ("young", 5)):
        status = runs(rebalances=[moved])
        status["conditions"][0]["lastTransitionTime"] = time_of(-60 * minutes)
        status["allocation"]["ending"] = {"cause": "Preempted", "message": "m", "since": time_of(-10)}
        world.job("team", name, status)
    async with looked_at(world) as client:
        screen = plain(await text_of(client, "/jobs/team/old"))
        assert re.findall("Launched|LayersMoved|Preempted", screen) == [
            "Preempted",
            "LayersMoved",
            "Launched",
        ]
        assert f"round-1 {time_of(-300)}" in plain(await text_of(client, "/decisions"))


async def test_teams_show_what_they_are_owed_have_and_may_spend():
    """Owed by weights, level by level, among teams with jobs; only where the policy reads teams."""
    world = World()
    entities = {"vision": {"weight": 3}, "speech": {"weight": 1}, "idle": {"weight": 9}}
    objective = {"policy": "hierarchical", "entities": entities}
    teams = [{"team": "vision", "since": time_of(-900), "cost": 40.0}]
    world.policy(objective=objective, budgets={"vision": {"amount": 80.0}}, status={"teams": teams})
    world.job("team", "one", runs(), entity="vision")
    world.job("team", "two", waits(), entity="speech")
    async with looked_at(world) as client:
        words = plain(await text_of(client, "/teams"))
    assert "vision 1 0 6 2 12.54" in words and "40.00 80.00 (50%)" in words
    assert "speech 1 1 2 0 0.00" in words
    plainly = World()
    plainly.policy()
    plainly.job("team", "one", runs(), entity="vision")
    async with looked_at(plainly) as client:
        assert "vision 1 0 - 2" in plain(await text_of(client, "/teams"))
    world.page = Page(world.recent, Everybody({"team"}))
    world.job("secret", "three", runs(), entity="speech")
    world.job("secret", "four", runs(), entity="idle")
    async with looked_at(world) as client:  # others' teams have their part, and hers its budget
        words = plain(await text_of(client, "/teams"))
    assert "vision 1 0 1.85 2 12.54" in words and "40.00 80.00 (50%)" in words and "idle" not in words


async def test_decisions_are_stepped_through_round_by_round():
    """The newest first; each has its gap, what was chosen, and the next best; an unknown one is said."""
    world = World()
    world.policy(round_="round-1")
    world.job("team", "one", runs())
    world.recent.work_out()
    world.now += 300
    world.policy(round_="round-2")
    second = {"planId": "round-2", "chosen": "4 x k80", "nextBest": "2 x v100", "why": "v100 is dear now"}
    world.job("team", "one", {**runs(), "lastDecision": second})
    async with looked_at(world) as client:
        newest = plain(await text_of(client, "/decisions"))
        assert "team/one 4 x k80 2 x v100 v100 is dear now" in newest and "gap 2%" in newest
        before = plain(await text_of(client, "/decisions?round=round-1"))
        assert "team/one 2 x v100 2 x k80: 1 steps/s its share is 57 %" in before and "round after" in before
        assert "not among those that are remembered" in plain(await text_of(client, "/decisions?round=<b>"))
        world.now += 2 * 3600  # a job's link to the round that it runs by
        assert "its share is 57 %" in plain(await text_of(client, "/decisions?round=round-1"))
        assert 'href="/jobs/team/one"' in await text_of(client, "/decisions")
        world.delete("team", "one")
        world.now += 10
        assert 'href="/jobs/team/one"' not in await text_of(client, "/decisions")
    async with looked_at(World()) as client:
        assert "No decision is remembered" in plain(await text_of(client, "/decisions"))


@pytest.mark.parametrize(
    "spec", [None, [1], "text", 7, {"totalSteps": "9", "entity": [1], "dataLocation": 1, "throughput": 2}]
)
async def test_a_spec_of_any_shape_is_shown_beside_the_others(spec):
    """A definition that was installed without its schema takes any value."""
    world = World()
    world.policy()
    world.job("team", "one", runs())
    world.job("team", "two", runs())
    stored = world.caches[JOB].get(("team", "two"))
    item = {**stored, "metadata": {**stored["metadata"], "resourceVersion": "999999"}, "spec": spec}
    world.caches.wrote(JOB, item)
    world.recent.work_out()
    async with looked_at(world) as client:
        for path in ("/", "/jobs", "/jobs/team/two", "/jobs/team/two/yaml", "/teams", "/decisions"):
            assert "two" in plain(await text_of(client, path)) or path in ("/", "/teams", "/decisions")
    found = JobRecord.of(item, NOW, deleted=False)
    assert (found.team, found.total_steps) == ("", 0)


@pytest.mark.slow
async def test_texts_of_users_are_shown_and_never_obeyed():
    """Markup, templates, scripts and characters that turn a text around, in every field that people write."""
    world = World()
    world.policy(pools=(HOSTILE,))
    decision = {"planId": HOSTILE, "chosen": HOSTILE, "nextBest": HOSTILE, "why": HOSTILE}
    status = {**runs(HOSTILE), "lastDecision": decision, "restarts": {HOSTILE: 1}}
    world.job("team", "one", status, entity=HOSTILE, model={"name": HOSTILE})
    world.job("team", "two", waits(HOSTILE, HOSTILE))
    async with looked_at(world) as client:
        for path in (
            *SCREENS,
            "/jobs/team/two",
            "/jobs/%3Cscript%3E/x",
            "/jobs?text=%3Cscript%3E&pool=%22%3E",
        ):
            async with client.get(path) as answer:
                screen = await answer.text()
            assert answer.status in (200, 404), screen
            assert "<script>" not in screen and "\u202e" not in screen
            assert "\N{SKULL}49" not in screen
            assert len(re.findall("<script ", screen)) == 3
            assert not re.findall(r"\son\w+=|\sstyle=|javascript:", re.sub(r">[^<]*<", "><", screen))


@pytest.mark.slow
async def test_a_namespace_that_may_not_be_seen_is_nowhere():
    """Not its jobs, their names, decisions or GPUs' owners; a job there is like one that is none."""
    world = World(Everybody({"open"}, policies=True))
    world.policy()
    world.job("open", "mine", runs())
    world.job(
        "secret", "theirs", {**runs(), "lastDecision": {"planId": "round-9", "chosen": "x", "why": "y"}}
    )
    async with looked_at(world) as client:
        for path in ("/", "/?window=all", "/jobs", "/teams", "/decisions", "/jobs/open/mine"):
            screen = await text_of(client, path)
            assert "secret" not in screen and "theirs" not in screen, path
        for path in ("/jobs/secret/theirs", "/jobs/secret/none"):
            assert "or you may not see it" in await text_of(client, path, 404)
        assert "the page has no such screen" in await text_of(client, "/none", 404)
        await text_of(client, "/jobs/secret/theirs/yaml", 404)
        await text_of(client, "/jobs/secret/theirs/curves.json", 404)
        assert "1 jobs: 1 Running" in plain(await text_of(client, "/"))


async def test_pools_are_not_shown_to_who_may_not_see_the_policy():
    """And the page says what is missing."""
    world = World(Everybody(policies=False))
    world.policy(budgets={"vision": {"amount": 80.0}})
    world.job("team", "one", runs(), entity="vision")
    async with looked_at(world) as client:
        words = plain(await text_of(client, "/"))
        assert "You may not get ClusterPolicies" in words and "2.50" not in words
        assert "80.00" not in plain(await text_of(client, "/teams"))
        assert "gap" not in plain(await text_of(client, "/decisions"))
        assert (await (await client.get("/cluster/curves.json")).json())["data"] == [[]]


async def test_what_was_deleted_is_in_the_timeline_and_no_longer_a_link():
    """Its GPUs are free from then on."""
    world = World()
    world.policy()
    world.job("team", "gone", runs())
    world.recent.work_out()
    world.now += 60
    world.delete("team", "gone")
    async with looked_at(world) as client:
        screen = await text_of(client, "/")
    assert "team/gone: 2 GPUs of fast, launch 1, 11 min" in screen
    assert '"/jobs/team/gone"' not in screen


async def test_a_page_that_fails_says_so_and_the_others_live():
    """What cannot be read is one answer's fault."""
    world = World()
    world.job("team", "one", {**runs(), "costSoFar": "much"})
    world.job("team", "two", waits())
    async with looked_at(world) as client:
        assert "this page failed" in await text_of(client, "/jobs/team/one", 500)
        await text_of(client, "/jobs/team/two")


async def test_a_page_of_ones_own_says_that_the_api_server_is_gone():
    """What was seen last is not shown as of now; it comes back by itself."""

    async def gone():
        raise Unreachable("connection refused")

    access = OneKey(gone)
    world = World(access)
    world.job("team", "one", runs())
    async with looked_at(world, login=False) as client:
        await client.get(f"/open?key={access.key}", allow_redirects=False)
        screen = await text_of(client, "/jobs/team/one", 503)
    assert "did not answer" in screen and 'hx-get="/jobs/team/one"' in screen


@pytest.mark.slow
async def test_five_thousand_jobs_are_a_bounded_page():
    """No screen grows with the number of jobs."""
    world = World()
    world.policy(pools=[f"pool-{number}" for number in range(40)])
    for number in range(5000):
        status = runs(f"pool-{number % 40}") if number % 2 else waits(f"Reason{number % 700}")
        world.job(f"ns-{number % 300}", f"job-{number}", status, entity=f"team-{number % 90}")
    async with looked_at(world) as client:
        sizes = {path: len(await text_of(client, path)) for path in ("/", "/jobs", "/decisions", "/teams")}
        assert "4901 to 5000 of 5000 jobs" in plain(await text_of(client, "/jobs?page=50"))
    assert max(sizes.values()) < 500_000, sizes
