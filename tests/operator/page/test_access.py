"""Who is let in: by a real API server's reviews, and how often it is asked."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ballast_operator.api.rbac import page_rules
from ballast_operator.errors import Forbidden
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import SUBJECT_ACCESS_REVIEW, TOKEN_REVIEW
from ballast_operator.page.access import (
    KEPT_SECONDS,
    LONGEST_TOKEN,
    MOST_LOGINS,
    OneKey,
    Person,
    Reviews,
    Sessions,
    TooManyLoginsError,
)
from kubernetes import client

from tests.operator.page.test_page import looked_at, plain, text_of
from tests.operator.page.world import World, runs
from tests.support.access import account, binding, kubeconfig_of, may, new_account
from tests.support.control_plane import ControlPlane
from tests.support.servers import a_kubeconfig
from tests.support.waiting import eventually


class Server:
    """Counts what it is asked; knows the token "good"."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.allowed: set[tuple[str, str]] = set()

    async def ask(self, kind: Any, body: Any) -> Any:
        self.asked.append(kind.kind)
        if kind is TOKEN_REVIEW:
            good = body["spec"]["token"].startswith("good")
            return {"status": {"authenticated": good, "user": {"username": "ann"} if good else {}}}
        assert kind is SUBJECT_ACCESS_REVIEW
        what = body["spec"]["resourceAttributes"]
        return {"status": {"allowed": (what["resource"], what["namespace"]) in self.allowed}}


async def test_answers_count_for_a_minute():
    """Then a token that was withdrawn, and a right that was taken, are gone."""
    now, server = [0.0], Server()
    reviews = Reviews(server.ask, clock=lambda: now[0])
    server.allowed = {("trainingjobs", "a")}
    for _ in range(5):
        person = await reviews.person("good")
        assert person == Person(name="ann")
        assert await reviews.namespaces(person, {"a", "b"}) == {"a"}
        assert await reviews.person("bad") is None
    assert server.asked.count("TokenReview") == 2
    assert server.asked.count("SubjectAccessReview") == 3  # of all namespaces, and of each
    server.allowed = set()
    now[0] = KEPT_SECONDS + 1
    assert await reviews.namespaces(person, {"a", "b"}) == frozenset()
    assert await reviews.person("good") is not None
    assert server.asked.count("TokenReview") == 3


async def test_who_may_see_all_jobs_costs_one_review():
    """However many namespaces there are."""
    server = Server()
    server.allowed = {("trainingjobs", "")}
    reviews = Reviews(server.ask, clock=lambda: 0.0)
    many = {f"ns-{number}" for number in range(500)}
    assert await reviews.namespaces(Person(name="ann"), many) == many
    assert server.asked == ["SubjectAccessReview"]


async def test_a_first_look_does_not_wait_for_the_reviews_of_many_namespaces():
    """It says how many are not answered; the next look has them, and shares the reviews under way."""
    now, server, let = [0.0], Server(), asyncio.Event()
    many = {f"ns-{number:03}" for number in range(200)}
    server.allowed = {("trainingjobs", name) for name in many if name != "ns-000"}

    async def ask(kind: Any, body: Any) -> Any:
        if body["spec"]["resourceAttributes"]["namespace"] > "ns-009":
            await let.wait()
        return await server.ask(kind, body)

    reviews, ann = Reviews(ask, clock=lambda: now[0]), Person(name="ann")
    answered = {f"ns-00{number}" for number in range(1, 10)}
    while (seen := await reviews.namespaces(ann, many)) != answered:
        assert seen < answered  # of a machine that is slow, a later look
    assert reviews.waits_for(ann) == 190 and reviews.waits_for(Person(name="bob")) == 0
    assert await reviews.namespaces(ann, many) == answered
    let.set()
    await eventually_settled(reviews)
    assert await reviews.namespaces(ann, many) == many - {"ns-000"}
    assert len(server.asked) == 201
    for at in range(10, 200, 10):  # who keeps looking never waits, and a right that is taken is gone
        now[0] = at
        if at == 100:
            server.allowed.remove(("trainingjobs", "ns-001"))
        assert len(await reviews.namespaces(ann, many)) >= 198
        await eventually_settled(reviews)
    assert await reviews.namespaces(ann, many) == many - {"ns-000", "ns-001"}
    assert len(server.asked) <= 201 * 6


async def test_an_api_server_that_answers_none_of_many_reviews_is_told_of_once(caplog):
    """Not once for each namespace, at each look."""

    async def ask(kind: Any, body: Any) -> Any:
        if body["spec"]["resourceAttributes"]["namespace"]:
            raise Forbidden("no")
        return {"status": {"allowed": False}}

    reviews = Reviews(ask, clock=lambda: 0.0)
    for _ in range(2):
        with pytest.raises(Forbidden):
            await reviews.namespaces(Person(name="ann"), {f"ns-{number}" for number in range(100)})
    gc.collect()
    assert not caplog.records


async def eventually_settled(reviews: Reviews) -> None:
    while reviews._asking:
        await asyncio.wait(reviews._asking.values())


async def test_guesses_are_limited_and_do_not_lock_out_who_was_let_in():
    """The API server is asked of so many tokens that are not known; one that was good is asked of again."""
    now, server = [0.0], Server()
    reviews = Reviews(server.ask, clock=lambda: now[0])
    await reviews.person("good")
    with pytest.raises(TooManyLoginsError):
        for number in range(1000):
            await reviews.person(f"guess-{number}")
    assert len(server.asked) <= MOST_LOGINS
    now[0] = 1.0
    assert await reviews.person("good") is not None
    now[0] = KEPT_SECONDS + 2
    with pytest.raises(TooManyLoginsError):
        for number in range(1000):
            await reviews.person(f"more-{number}")
    assert await reviews.person("good") is not None  # asked anew, whatever others do


@pytest.mark.parametrize("token", ["", "x" * (LONGEST_TOKEN + 1), "a\nb", "\N{SKULL}"])
async def test_what_is_no_token_is_not_asked_of(token: str):
    """It is nobody's."""
    server = Server()
    assert await Reviews(server.ask, clock=lambda: 0.0).person(token) is None
    assert server.asked == []


async def test_a_user_without_a_name_is_nobody():
    """So is one of whom the API server says anything but yes."""

    async def answer(kind: Any, body: Any) -> Any:
        return answers.pop()

    answers = [{}, {"status": None}, {"status": {"authenticated": "true", "user": {"username": "a"}}}]
    answers.append({"status": {"authenticated": True, "user": {"username": ""}}})
    reviews = Reviews(answer, clock=lambda: 0.0)
    for number in range(len(answers)):
        assert await reviews.person(f"token-{number}") is None


async def test_the_key_of_a_local_page_is_the_only_one():
    """It changes with each start."""
    one, other = OneKey(), OneKey()
    assert await one.person(one.key) is not None
    for wrong in ("", other.key, one.key + "x", "\N{SKULL}", "\udc80"):
        assert await one.person(wrong) is None


async def test_sessions_end_and_are_bounded():
    """After eight hours, and the oldest where there are too many."""
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    names = [sessions.begin(f"token-{number}") for number in range(1200)]
    assert sessions.token(names[0]) == "" and sessions.token(names[-1]) == "token-1199"
    now[0] = 9 * 3600
    assert sessions.token(names[-1]) == ""


@pytest.fixture
def reviewer(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A kubeconfig of an account that has the page's rules and no others."""
    with control_plane.client() as api:
        rbac, name = client.RbacAuthorizationV1Api(api), f"page-{namespace}"
        token = new_account(api, namespace, "reviewer")
        rbac.create_cluster_role({"metadata": {"name": name}, "rules": page_rules()})
        rbac.create_cluster_role_binding(binding(name, namespace, "reviewer"))
        for group, reviews in (("authentication", "tokenreviews"), ("authorization", "subjectaccessreviews")):
            asked = ("create", f"{group}.k8s.io", reviews)
            user = account(namespace, "reviewer")
            eventually(lambda user=user, asked=asked: may(api, user, *asked), "the reviewer's rights")
        yield kubeconfig_of(token, control_plane.kubeconfig, tmp_path / "kubeconfig")
        rbac.delete_cluster_role_binding(f"reviewer-{namespace}")
        rbac.delete_cluster_role(name)


@pytest.mark.api
async def test_a_real_token_shows_what_its_account_may_get(
    control_plane: ControlPlane, reviewer: Path, namespace: str
) -> None:
    """A service account's token: its namespace's jobs, no other's, and no pools; a wrong one: nothing."""
    with control_plane.client() as api:
        rbac, token = client.RbacAuthorizationV1Api(api), new_account(api, namespace, "ann")
        rule = {"apiGroups": ["ballast.dev"], "resources": ["trainingjobs"], "verbs": ["get"]}
        rbac.create_namespaced_role(namespace, {"metadata": {"name": "see"}, "rules": [rule]})
        rbac.create_namespaced_role_binding(namespace, binding("see", namespace, "ann", kind="Role"))
        right = ("get", "ballast.dev", "trainingjobs")
        eventually(
            lambda: may(api, account(namespace, "ann"), *right, namespace=namespace), "the account's right"
        )
    loop = asyncio.get_running_loop()
    async with await connect(str(reviewer)) as cluster:
        world = World(Reviews(cluster.ask, clock=loop.time))
        world.policy()
        world.job(namespace, "mine", runs())
        world.job("elsewhere", "theirs", runs())
        async with looked_at(world, login=False) as page:
            async with page.post("/login", data={"token": f"{token[:-4]}AAAA"}) as answer:
                assert answer.status == 401
            async with page.post("/login", data={"token": token}) as answer:
                assert answer.status == 200
                assert f"system:serviceaccount:{namespace}:ann" in await answer.text()
            listed = await text_of(page, "/jobs")
            assert f"{namespace}/mine" in listed and "theirs" not in listed
            await text_of(page, "/jobs/elsewhere/theirs", 404)
            assert "You may not get ClusterPolicies" in plain(await text_of(page, "/"))


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A kubeconfig of an API server that does not answer."""
    return a_kubeconfig(tmp_path / "away", "https://127.0.0.1:1", {"token": "t"})


async def test_an_operator_without_the_right_to_ask_says_which_and_not_that_there_was_no_answer() -> None:
    """Its account is not told to whom it has not let in."""

    async def ask(kind: Any, body: Any) -> Any:
        raise Forbidden('HTTP 403 User "system:serviceaccount:a:b" cannot create resource "tokenreviews"')

    world = World(Reviews(ask, clock=lambda: 0.0))
    asked = {"Authorization": "Bearer good"}
    async with looked_at(world, login=False) as page, page.get("/jobs", headers=asked) as answer:
        assert answer.status == 503
        said = plain(await answer.text())
    assert "To fix: grant its account to create tokenreviews and subjectaccessreviews" in said
    assert "serviceaccount:a:b" not in said


async def test_a_screen_of_one_job_asks_of_one_namespace() -> None:
    """However many there are; the list asks of each, once a minute."""
    server = Server()
    server.allowed = {("trainingjobs", "ns-007")}
    world = World(Reviews(server.ask, clock=lambda: 0.0))
    for number in range(200):
        world.job(f"ns-{number:03}", "one", runs())
    headers = {"Authorization": "Bearer good"}

    async def reviews(path: str, status: int = 200) -> int:
        before = len(server.asked)
        async with page.get(path, headers=headers) as answer:
            assert answer.status == status
        return len(server.asked) - before

    async with looked_at(world, login=False) as page:
        assert await reviews("/jobs/ns-007/one") == 4  # the token, all namespaces, its own, and policies
        assert await reviews("/jobs/ns-007/one/curves.json") == await reviews("/jobs/ns-007/one/yaml") == 0
        assert await reviews("/jobs/ns-008/one", 404) == 1
        assert await reviews("/jobs") == 198
        assert await reviews("/") == 0


async def test_an_api_server_that_does_not_answer_lets_nobody_in(nowhere: str) -> None:
    """The page says so, and serves nothing."""
    async with await connect(nowhere, request_seconds=5.0) as cluster:
        world = World(Reviews(cluster.ask, clock=asyncio.get_running_loop().time))
        world.job("team", "one", runs())
        asked = {"Authorization": "Bearer good"}
        async with looked_at(world, login=False) as page, page.get("/jobs", headers=asked) as answer:
            assert answer.status == 503
            html = await answer.text()
    assert "the API server did not answer" in html and "team/one" not in html
