"""The page over HTTP: login, five screens, and the numbers of their curves."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ballast_operator.errors import Forbidden, HistoryError, OperatorError
from ballast_operator.history.recent import Recent
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import Kind
from ballast_operator.listening import NO_REQUEST, listen
from ballast_operator.page import screens
from ballast_operator.page.access import (
    LONGEST_TOKEN,
    Access,
    OneKey,
    Person,
    Reviews,
    Sessions,
    TooManyLoginsError,
)
from ballast_operator.tasks import LoopThread

if TYPE_CHECKING:
    from ballast_operator.history.store import History

logger = logging.getLogger(__name__)

COOKIE = "ballast-session"

LOOK_SECONDS = 2.0
"""Seconds for which everybody sees the same look at the caches."""

WORK_OUT_SECONDS = 1.0

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: no script, style or frame that is not the page's own, and nothing is kept."""

STATIC = {
    "htmx.min.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "page.js": "text/javascript",
    "uPlot.min.css": "text/css",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}

SCREENS = (("/", "Cluster"), ("/jobs", "Jobs"), ("/teams", "Teams"), ("/decisions", "Decisions"))

REFRESHED = frozenset({"cluster.html", "jobs.html", "job.html", "teams.html", "decisions.html"})

_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that are not seen, or turn the direction of what follows them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PERSON = web.RequestKey("person", Person)
LOOKED_AT = web.RequestKey("looked_at", float)


class Page:
    """The page of one operator, or of one look at a cluster or a simulation.

    ``window``: of time that the first screen shows, unless another is chosen. ``history``: what
    deleted jobs did; None: none is kept.
    """

    def __init__(
        self,
        recent: Recent,
        access: Access,
        *,
        title: str = "",
        window: str = "1h",
        history: "History | None" = None,
    ) -> None:
        self._recent, self._access, self._clock = recent, access, recent.clock
        self._title, self._window = title, window
        self._history = history
        self._sessions = Sessions(time.monotonic)
        self._seen: screens.Seen | None = None
        self._templates = _templates()

    @property
    def application(self) -> web.Application:
        """Application of aiohttp."""
        application = web.Application(middlewares=[self._guard], client_max_size=4 * LONGEST_TOKEN)
        add = application.router.add_get
        add("/", self._cluster)
        add("/cluster/curves.json", self._cluster_curves)
        add("/jobs", self._jobs)
        add("/jobs/{namespace}/{name}", self._job)
        add("/jobs/{namespace}/{name}/curves.json", self._job_curves)
        add("/jobs/{namespace}/{name}/yaml", self._job_yaml)
        add("/teams", self._teams)
        add("/decisions", self._decisions)
        if self._history is not None:
            add("/history", self._past_jobs)
            add("/history.json", self._past_jobs_json)
            add("/history/{uid}", self._past_job)
        add("/static/{file}", self._static)
        add("/login", self._login_form)
        application.router.add_post("/login", self._login)
        application.router.add_post("/logout", self._logout)
        if isinstance(self._access, OneKey):
            add("/open", self._open)
        return application

    async def work_out(self) -> None:
        """Keep up with what happens, until cancelled."""
        while True:
            self._recent.work_out()
            await asyncio.sleep(WORK_OUT_SECONDS)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nobody is let in who has not logged in; every answer has the headers, also one that fails."""
        answer: web.StreamResponse
        try:
            answer = await self._let_in(request, handler)
        except web.HTTPException as error:
            unknown = "the page has no such screen" if error.text == "404: Not Found" else ""
            answer = self._failed(request, error.status, unknown or error.text or error.reason)
        except TooManyLoginsError:
            text = "there were too many logins with tokens that are not known. To fix: wait a moment"
            answer = self._failed(request, 429, text)
            answer.headers["Retry-After"] = "5"
        except HistoryError as error:
            answer = self._failed(request, 503, str(error))
        except Forbidden as error:
            logger.warning("page: %s", error)
            text = (
                "the operator may not ask the API server who you are and what you may see. To fix: grant its "
                "account to create tokenreviews and subjectaccessreviews, as the chart does with ui.enabled"
            )
            answer = self._failed(request, 503, text)
        except OperatorError as error:
            logger.warning("page: %s", error)
            text = "the API server did not answer, so it is not known what you may see. To fix: try again"
            answer = self._failed(request, 503, text)
        except Exception:
            logger.exception("page %s failed", request.path)
            answer = self._failed(
                request, 500, "this page failed. To fix: report it, with the operator's log"
            )
        answer.headers.update(HEADERS)
        return answer

    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and request.headers.get("Sec-Fetch-Site", "same-origin") not in (
            "same-origin",
            "none",
        ):
            raise web.HTTPForbidden(text="a form of another site was sent here")
        if request.path.startswith(("/static/", "/login", "/open")):
            return await handler(request)
        token = self._sessions.token(request.cookies.get(COOKIE, ""))
        scheme, _, stated = request.headers.get("Authorization", "").partition(" ")
        bearer = scheme.lower() == "bearer"  # a proxy's own password is none of ours
        if bearer:
            token = stated.strip()
        person = await self._access.person(token) if token else None
        if person is None:
            if request.path.endswith(".json") or bearer:
                raise web.HTTPUnauthorized(text="log in first")
            return _see("/login" + (f"?to={quote(request.path_qs)}" if request.path_qs != "/" else ""))
        request[PERSON] = person
        return await handler(request)

    async def _view(self, request: web.Request, *, of: str = "") -> screens.View:
        """View of the person, of namespace ``of`` alone where it is given."""
        now = self._clock()
        if self._seen is None or not 0 <= now - self._seen.at < LOOK_SECONDS:
            self._recent.work_out()
            self._seen = screens.Seen.of(self._recent, now)
        seen, person = self._seen, request[PERSON]
        request[LOOKED_AT] = seen.at
        return screens.View(
            seen=seen,
            recent=self._recent,
            namespaces=await self._access.namespaces(
                person, seen.namespaces & {of} if of else seen.namespaces
            ),
            policies=await self._access.sees_policies(person),
        )

    async def _cluster(self, request: web.Request) -> web.Response:
        view = await self._view(request)
        window = request.query.get("window", "")
        found = screens.cluster(view, window if window in screens.WINDOWS else self._window)
        return self._show(request, "cluster.html", found)

    async def _cluster_curves(self, request: web.Request) -> web.Response:
        return web.json_response(screens.cluster_curves(await self._view(request)))

    async def _jobs(self, request: web.Request) -> web.Response:
        found = screens.jobs(await self._view(request), screens.Filter.of(request.query))
        return self._show(request, "jobs.html", found)

    async def _one(self, request: web.Request) -> tuple[screens.View, Any]:
        """The view, and the address's job. Raises HTTPNotFound: none that the person may see, or none."""
        named = request.match_info
        view = await self._view(request, of=named["namespace"])
        item = view.job((named["namespace"], named["name"]))
        if item is None:
            text = f"there is no job {named['namespace']}/{named['name']}, or you may not see it"
            raise web.HTTPNotFound(text=text)
        return view, item

    async def _job(self, request: web.Request) -> web.Response:
        view, item = await self._one(request)
        return self._show(request, "job.html", screens.job(view, item))

    async def _job_curves(self, request: web.Request) -> web.Response:
        view, item = await self._one(request)
        return web.json_response(screens.job_curves(view, item))

    async def _job_yaml(self, request: web.Request) -> web.Response:
        _, item = await self._one(request)
        key = (item["metadata"]["namespace"], item["metadata"]["name"])
        found = {"text": screens.job_yaml(item), "key": key, "link": screens.job_link(key)}
        return self._show(request, "yaml.html", found)

    async def _teams(self, request: web.Request) -> web.Response:
        return self._show(request, "teams.html", screens.teams(await self._view(request)))

    async def _decisions(self, request: web.Request) -> web.Response:
        view, chosen = await self._view(request), request.query.get("round", "")[:253]
        return self._show(request, "decisions.html", screens.decisions(view, chosen))

    async def _past(self, request: web.Request) -> dict[str, Any]:
        """Jobs of history that may be seen, the number of the page, and whether there are more."""
        assert self._history is not None
        chosen, person = screens.Filter.of(request.query), request[PERSON]
        there_are = await asyncio.to_thread(self._history.namespaces)
        seen = await self._access.namespaces(person, there_are)
        asked = seen & {chosen.namespace} if chosen.namespace else seen
        most, skip = screens.PAGE_ROWS + 1, (chosen.page - 1) * screens.PAGE_ROWS
        found = await asyncio.to_thread(
            self._history.jobs, namespaces=asked, name=chosen.text, most=most, skip=skip
        )
        return {"jobs": found[: most - 1], "page": chosen.page, "more": len(found) == most}

    async def _past_jobs(self, request: web.Request) -> web.Response:
        chosen = screens.Filter.of(request.query)
        return self._show(request, "history.html", {**await self._past(request), "chosen": chosen})

    async def _past_jobs_json(self, request: web.Request) -> web.Response:
        found = await self._past(request)
        return web.json_response({**found, "jobs": [dataclasses.asdict(job) for job in found["jobs"]]})

    async def _past_job(self, request: web.Request) -> web.Response:
        assert self._history is not None
        uid = request.match_info["uid"]
        found = await asyncio.to_thread(self._history.jobs, uid=uid, most=1)
        namespaces = await self._access.namespaces(request[PERSON], {job.namespace for job in found})
        if not found or found[0].namespace not in namespaces:
            raise web.HTTPNotFound(text="there is no such job in history, or you may not see it")
        events = await asyncio.to_thread(self._history.events, uid)
        return self._show(request, "past_job.html", {"job": found[0], "events": events})

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in STATIC:
            raise web.HTTPNotFound(text="there is no such file")
        content = files("ballast_operator.page").joinpath("static", name).read_bytes()
        return web.Response(body=content, content_type=STATIC[name], charset="utf-8")

    async def _login_form(self, request: web.Request) -> web.Response:
        return self._show(
            request, "login.html", {"problem": "", "to": _own_path(request.query.get("to", ""))}
        )

    async def _login(self, request: web.Request) -> web.StreamResponse:
        try:
            form = await request.post()
        except (ValueError, LookupError, *NO_REQUEST) as error:
            raise web.HTTPBadRequest(text="what was sent is no form of this page") from error
        token, to = str(form.get("token", "")).strip(), _own_path(str(form.get("to", "")))
        if await self._access.person(token) is None:
            text = "the API server does not know this token, or it has expired"
            return self._show(request, "login.html", {"problem": text, "to": to}, status=401)
        return self._begin(request, token, to)

    async def _open(self, request: web.Request) -> web.StreamResponse:
        key = request.query.get("key", "")
        if await self._access.person(key) is None:
            raise web.HTTPForbidden(text="this is not the address that `ballast ui` has printed")
        return self._begin(request, key, "/")

    def _begin(self, request: web.Request, token: str, to: str) -> web.StreamResponse:
        answer = _see(to)
        secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        answer.set_cookie(
            COOKIE, self._sessions.begin(token), httponly=True, samesite="Strict", secure=secure, path="/"
        )
        return answer

    async def _logout(self, request: web.Request) -> web.StreamResponse:
        self._sessions.end(request.cookies.get(COOKIE, ""))
        answer = _see("/login")
        answer.del_cookie(COOKIE, path="/")
        return answer

    def _failed(self, request: web.Request, status: int, text: str) -> web.Response:
        if request.path.endswith(".json"):
            return web.json_response({"error": text}, status=status)
        return self._show(request, "failed.html", {"text": text}, status=status)

    def _show(
        self, request: web.Request, template: str, found: Mapping[str, Any], *, status: int = 200
    ) -> web.Response:
        person = request.get(PERSON)
        text = self._templates.get_template(template).render(
            **found,
            person=person.name if person is not None else "",
            here=request.path,
            address=request.path_qs,
            refreshes=status == 503 or (template in REFRESHED and status == 200),
            title=self._title,
            looked_at=request.get(LOOKED_AT, self._clock()),
            not_asked=self._access.waits_for(person) if person is not None else 0,
            one_key=isinstance(self._access, OneKey),
            screens=SCREENS + ((("/history", "History"),) if self._history is not None else ()),
        )
        return web.Response(text=text, content_type="text/html", status=status)


def _own_path(to: str) -> str:
    """An address of this page, whatever was asked for."""
    return to if re.fullmatch(r"/[A-Za-z0-9._~%/?&=+-]*", to) and not to.startswith("//") else "/"


def _see(address: str) -> web.Response:
    """Go on to another address of this page."""
    return web.Response(status=303, headers={"Location": address})


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("ballast_operator.page"),
        autoescape=True,
        finalize=_seen_as_written,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clock": lambda at: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
        "amount": lambda value: "-" if value is None else f"{value:,.2f}",
        "number": _number,
        "percent": lambda value: "-" if value is None else f"{value:.0%}",
    }
    return environment


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def _seen_as_written(value: Any) -> Any:
    """A text without characters that hide something; markup of the page's own as it is."""
    return _HIDDEN.sub("\ufffd", value) if isinstance(value, str) and not isinstance(value, Markup) else value


@contextlib.asynccontextmanager
async def serving(page: Page, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve the page within it; yields the port, a free one where it is 0. Raises OSError: it is taken."""
    runner, served = await listen(page.application, host, port)
    keeping_up = asyncio.create_task(page.work_out())
    try:
        yield served
    finally:
        keeping_up.cancel()
        await asyncio.gather(keeping_up, return_exceptions=True)
        await runner.cleanup()


@contextlib.asynccontextmanager
async def beside_the_operator(
    recent: Recent,
    *,
    history: "History | None",
    connected: Coroutine[Any, Any, Cluster],
    on_answer: Callable[[str, Kind, OperatorError | None], None],
    host: str,
    port: int,
) -> AsyncIterator[int]:
    """Serve the operator's page within it, on a loop of its own: nothing else waits for who looks.

    ``connected`` makes a connection of its own, for reviews; ``on_answer`` hears of each answer of the API
    server. ``history``: what deleted jobs did; None: none is kept. Yields the port, a free one where ``port``
    is 0.

    Raises:
        OSError: the port is taken.
    """
    async with LoopThread("page") as side:
        cluster = await side.run(connected)
        cluster.on_answer = on_answer
        reviews = Reviews(cluster.ask, clock=time.monotonic)
        page, stack = Page(recent, reviews, history=history), contextlib.AsyncExitStack()
        stack.push_async_callback(cluster.close)
        try:
            yield await side.run(stack.enter_async_context(serving(page, host=host, port=port)))
        finally:
            await side.run(stack.aclose())
