"""The API client: a few verbs, each with a time limit, errors translated, writes fenced.

Everything that reaches the API server from the operator's own code goes through :class:`Cluster`.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from ballast.client.connection import (
    LEAST_OF_A_PAGE,
    MOST_LEVELS,
    MOST_OF_A_PAGE,
    configuration,
    smaller_page,
    truncate_depth,
)
from ballast_policies.contract.limits import nested_deeper
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.config import ConfigException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from ballast_operator.api.base import HALVES
from ballast_operator.errors import (
    OVER_QUOTA,
    Conflict,
    Expired,
    Forbidden,
    NotAllowed,
    NotFound,
    OperatorError,
    Rejected,
    ServerInternalError,
    TooSlow,
    Unavailable,
    Unreachable,
    for_good,
)
from ballast_operator.kube.kept_fields import prune_fields
from ballast_operator.kube.kinds import NAMESPACE, VERSION, Kind, Object

_Path = tuple[str | None, ...]
"""Keys from the status on; None: every entry of a list."""


class DroppedFields:
    """Fields of each kind's statuses that are not kept."""

    def __init__(self) -> None:
        self._fields: dict[Kind, frozenset[_Path]] = {}
        self._left_out: set[Kind] = set()

    def ask_again(self, kind: Kind) -> None:
        """All fields are written once more: a watch has ended, as it does where the definition changes."""
        self._left_out.discard(kind)

    def learn(self, kind: Kind, sent: Object, kept: Any) -> list[str] | None:
        """The fields that are dropped, after a status was written and read back; None: that is no news.

        Empty: a field that was dropped has been kept, so the definition is another one now.
        """
        known = self._fields.get(kind, frozenset())
        again = {field for field in known if _has(sent, field)}
        found = frozenset(_lacking(sent, kept, ()))
        if not found and not again:
            return None
        self._fields[kind] = found if again - found else found | known
        self._left_out.add(kind)
        return sorted(
            "status" + "".join("[]" if key is None else f".{key}" for key in field)
            for field in self._fields[kind]
        )

    def without(self, kind: Kind, status: Object) -> Object:
        """The status as it would be kept: what is dropped alone is no reason to write it."""
        if kind in self._left_out:
            for field in self._fields[kind]:
                status = _without(status, field)
        return status


def _lacking(sent: Any, kept: Any, path: _Path) -> Iterator[_Path]:
    """Paths of the fields of ``sent`` that ``kept`` does not have."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            if value is None:
                continue
            if isinstance(kept, dict) and name in kept:
                yield from _lacking(value, kept[name], (*path, name))
            else:
                yield (*path, name)
    elif isinstance(sent, list) and isinstance(kept, list):
        for value, other in zip(sent, kept, strict=False):
            yield from _lacking(value, other, (*path, None))


def _has(value: Any, path: _Path) -> bool:
    """True if the field at the path exists."""
    if not path:
        return value is not None
    if path[0] is None:
        return isinstance(value, list) and any(_has(part, path[1:]) for part in value)
    return isinstance(value, dict) and _has(value.get(path[0]), path[1:])


def _without(value: Any, path: _Path) -> Any:
    """The value without the field at a path."""
    name, rest = path[0], path[1:]
    if isinstance(value, list):
        return [_without(part, rest) for part in value] if name is None else value
    if not isinstance(value, dict) or name not in value:
        return value
    if not rest:
        return {key: part for key, part in value.items() if key != name}
    return {**value, name: _without(value[name], rest)}


def read_json(data: bytes) -> Any:
    """A value of at most :data:`MOST_LEVELS` levels.

    A custom resource may hold JSON of any shape, and the API server takes ten thousand levels of it: Python's
    decoder gives up at a tenth of that, for a whole list or watch because of one object. The object is
    refused when it is read: what is left is still far deeper than a spec may be
    (:mod:`ballast_policies.contract.limits`).

    Raises:
        ValueError: it is no JSON.
    """
    text = data.decode()
    many = text.count("{") + text.count("[") > MOST_LEVELS
    return json.loads(truncate_depth(text) if many and nested_deeper(text, MOST_LEVELS) else text)


FIELD_MANAGER = "ballast-operator"
"""Owner of the fields that the operator applies."""

Objects = list[Object]

METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Asks for the metadata of listed objects."""

WATCH_SECONDS = 300
"""Seconds after which the API server is to end a watch."""

IN_ONE_PIECE = 6
"""Times as long as other answers a list may take that is not read in pages."""

IN_ONE_PIECE_SECONDS = 3600.0
"""Seconds for which a kind is listed so after a list whose pages did not belong together any more."""

MOST_LINE = 2**25
"""Bytes of one event; objects have a few million at most."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pauses after address and credentials were read again; doubled while that does not help."""

logger = logging.getLogger(__name__)


class Sent(NamedTuple):
    """Body of a request: JSON, or a text of this media type."""

    content: Object | Sequence[Object] | str | None = None
    media_type: str | None = None


NOTHING = Sent()


def _reached(found: Any) -> tuple[object, ...]:
    """Settings of a connection, from a configuration. Raises OSError: a certificate cannot be read."""
    files = (found.ssl_ca_cert, found.cert_file, found.key_file)
    return found.host, found.proxy, found.verify_ssl, *(name and Path(name).read_bytes() for name in files)


async def connect(kubeconfig: str | None = None, *, request_seconds: float = 10.0) -> "Cluster":
    """Connect as ``ballast.client.connection.configuration`` says, with what it raises."""
    read = functools.partial(configuration, kubeconfig)
    return Cluster(
        kubernetes_client.ApiClient(await read()), request_seconds=request_seconds, read_again=read
    )


class Cluster:
    """A connection to one API server.

    Where the API server knows its credentials no more or is not there, ``read_again`` says what its address
    and credentials are now: tokens run out, plugins make new ones, authorities and addresses change.

    Attributes:
        request_seconds: how long an answer may take.
        dropped: fields of statuses that the API server has not kept.
        fence: called before every write; raises ``NotLeader`` or ``Fenced`` to forbid it.
        on_write: called with (verb, kind) after a write that landed; counts for the metrics.
        on_refused: called with the kind after a write whose content the API server refused.
        on_answer: called with (verb, kind, error or None) after each request, before the error is raised.
        on_date: called with (the answer's Date header or empty, when it was asked for by the wall clock).
        on_dropped: called with (kind, fields of a status that was written and not kept whole), and without
            fields once such a field has been kept.
    """

    def __init__(
        self,
        api: kubernetes_client.ApiClient,
        *,
        request_seconds: float,
        read_again: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        self._api = api
        self._read_again = read_again
        self._reached = _reached(api.configuration)
        self._reading: asyncio.Task[None] | None = None
        self._read_at, self._pause = float("-inf"), FIRST_PAUSE_SECONDS
        self._dynamic = DynamicClient(api)
        self.request_seconds = request_seconds
        self._page_sizes: dict[Kind, int] = {}
        self._in_one_piece_until: dict[Kind, float] = {}
        self.dropped = DroppedFields()
        self.fence: Callable[[], None] = lambda: None
        self.on_write: Callable[[str, Kind], None] = lambda verb, kind: None
        self.on_refused: Callable[[Kind], None] = lambda kind: None
        self.on_answer: Callable[[str, Kind, OperatorError | None], None] = lambda verb, kind, error: None
        self.on_date: Callable[[str, float], None] = lambda date, asked: None
        self.on_dropped: Callable[[Kind, list[str]], None] = lambda kind, fields: None

    @property
    def configuration(self) -> kubernetes_client.Configuration:
        """Address and credentials."""
        return self._api.configuration

    async def close(self) -> None:
        """Close the connections."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._api.close()

    def _doubt_credentials(self) -> None:
        """Read address and credentials again, beside what goes on; seldom where that does not help."""
        busy = self._reading is not None and not self._reading.done()
        since = time.monotonic() - self._read_at
        if self._read_again is None or busy or since < self._pause:
            return
        # Not after an answer: of a slow API server some requests are answered all the time.
        long_ago = since > 2 * LONGEST_PAUSE_SECONDS
        self._pause = FIRST_PAUSE_SECONDS if long_ago else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._reading = asyncio.create_task(self._reconnect(self._read_again))

    async def _reconnect(self, read_again: Callable[..., Awaitable[Any]]) -> None:
        old = self._api
        try:
            async with asyncio.timeout(LONGEST_PAUSE_SECONDS):
                found = await read_again(before=old.configuration)
            reached = _reached(found)
            same = reached == self._reached
            new = old if same else kubernetes_client.ApiClient(found)
        except (ConfigException, OSError) as error:
            why = str(error) or f"the kubeconfig's plugin has not ended in {LONGEST_PAUSE_SECONDS:g} s"
            logger.warning("address and credentials of the API server cannot be read: %s", why)
            return
        finally:
            self._read_at = time.monotonic()
        if same:
            old.configuration.api_key = found.api_key
            old.configuration.refresh_api_key_hook = found.refresh_api_key_hook
            return
        logger.info("address or certificates of the API server have changed: it is connected to anew")
        self._api, self._dynamic, self._reached = new, DynamicClient(new), reached
        await old.close()

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Read one object."""
        return await self._request("get", kind, kind.path(namespace, name))

    async def serves(self, kind: Kind) -> bool:
        """True if the API server has the kind, and tells us so."""
        try:
            found = await self._request("get", kind, kind.path().removesuffix(f"/{kind.plural}"))
        except (NotFound, Forbidden):
            return False
        return any(resource["name"] == kind.plural for resource in found.get("resources") or [])

    async def list(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        accept: str = "",
    ) -> tuple[Objects, int]:
        """Objects of a kind, as caches keep them, and the resourceVersion of the list; read in pages.

        ``accept``: :data:`METADATA`: nothing else of the objects, at a third of the cost for both sides.
        """
        items: Objects = []
        version = "0"
        where = {"namespace": namespace, "label_selector": label_selector, "field_selector": field_selector}
        async for page, read_at in self.pages(kind, **where, accept=accept):
            items += [prune_fields(kind, item) for item in page]
            version = read_at
        return items, int(version)

    async def pages(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        accept: str = "",
    ) -> AsyncIterator[tuple[Objects, str]]:
        """(objects, resourceVersion of the list) page by page; smaller ones where one does not come in time.

        The next list of the kind begins with pages as this one has ended, twice as large if it succeeded. Of
        one that took so long that its pages do not belong together any more, the next is read in one piece.

        Raises:
            Expired: such a list: it is to be read anew.
            OperatorError: the list was refused, or what was answered is none.
        """
        path, query = kind.path(namespace), dict[str, str]()
        whole = time.monotonic() < self._in_one_piece_until.get(kind, 0.0)
        most = 0 if whole else self._page_sizes.get(kind, MOST_OF_A_PAGE)
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        names = {"apiVersion": kind.api_version, "kind": kind.kind}
        while True:
            if most:
                query["limit"] = str(most)
            try:
                page = await self._request(
                    "list", kind, path, query=query, accept=accept, times=1 if most else IN_ONE_PIECE
                )
            except Unreachable as error:
                if isinstance(error.__cause__, TimeoutError):
                    self._page_sizes[kind] = LEAST_OF_A_PAGE
                    self._in_one_piece_until.pop(kind, None)
                self._page_sizes[kind] = most = smaller_page(most, error)
                continue
            except Expired:
                self._in_one_piece_until[kind] = time.monotonic() + IN_ONE_PIECE_SECONDS
                raise
            try:
                version, more = page["metadata"]["resourceVersion"], page["metadata"].get("continue")
                items = [{**item, **names} if isinstance(item, dict) else item for item in page["items"]]
                if not isinstance(page["items"], list) or not VERSION.fullmatch(version):
                    raise ValueError(f"items: a {type(items).__name__}; resourceVersion: {version!r}")
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise Unavailable(f"list {path}: what was answered is no list: {error}") from error
            yield items, version
            if not more:
                if most:
                    self._page_sizes[kind] = min(2 * most, MOST_OF_A_PAGE)
                return
            query["continue"] = more

    async def watch(
        self, kind: Kind, version: str, *, namespace: str = "", label_selector: str = ""
    ) -> AsyncIterator[bytes]:
        """Lines of a watch from ``version`` on, each an event, until the API server ends it.

        Raises:
            OperatorError: it was refused, or its connection was lost, or a line does not end.
        """
        path = kind.path(namespace)
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        query["resourceVersion"] = version
        if label_selector:
            query["labelSelector"] = label_selector
        limits = aiohttp.ClientTimeout(total=1.1 * WATCH_SECONDS, sock_connect=self.request_seconds)
        with self._translated("watch", kind, path):
            answer = await self._dynamic.request(
                "get", path, query_params=list(query.items()), serialize=False, _request_timeout=limits
            )
        self.dropped.ask_again(kind)
        torn: list[bytes] = []
        try:
            async for data in answer.content.iter_any():
                *lines, rest = data.split(b"\n")
                if lines:
                    lines[0] = b"".join([*torn, lines[0]])
                    torn = []
                for line in filter(None, lines):
                    yield line
                torn.append(rest)
                if sum(map(len, torn)) > MOST_LINE:
                    raise Unavailable(f"watch {path}: a line of more than {MOST_LINE} bytes")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"watch {path}: {type(error).__name__} {error}") from error
        finally:
            answer.close()

    async def apply(self, kind: Kind, body: Object) -> Object:
        """Server-side apply as the operator's field manager, taking over fields that others changed.

        With ``metadata.resourceVersion`` in the body, an object that has changed since is a Conflict.
        """
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        # A text goes out as it is only where the media type has a parameter.
        sent = Sent(apply_text(body), "application/apply-patch+yaml; charset=utf-8")
        return await self._write("patch", kind, path, sent, query=query)

    async def write_status(self, kind: Kind, body: Object) -> Object:
        """Replace the whole status: the operator's alone, it keeps nothing that anybody else has put there.

        Fields that the custom resource definition lacks are dropped by the API server without an error.
        With ``metadata.resourceVersion`` in the body, an object that has changed since is a Conflict.
        """
        metadata = body["metadata"]
        parts = [{"op": "add", "path": "/status", "value": body["status"]}]
        if "resourceVersion" in metadata:
            version = metadata["resourceVersion"]
            parts.append({"op": "add", "path": "/metadata/resourceVersion", "value": version})
        written = await self._write(
            "patch",
            kind,
            kind.path(metadata.get("namespace", ""), metadata["name"], "status"),
            Sent(parts, "application/json-patch+json"),
            query={"fieldManager": FIELD_MANAGER},
        )
        dropped = self.dropped.learn(kind, body["status"], written.get("status"))
        if dropped is not None:
            self.on_dropped(kind, dropped)
        return written

    async def create(self, kind: Kind, body: Object) -> Object:
        """Create an object; Conflict where the name is taken."""
        path = kind.path(body["metadata"].get("namespace", ""))
        return await self._write("post", kind, path, Sent(body), query={"fieldManager": FIELD_MANAGER})

    async def try_create(self, kind: Kind, body: Object) -> Object:
        """Ask what :meth:`create` would make, with all of the API server's checks; nothing is kept."""
        path = kind.path(body["metadata"].get("namespace", ""))
        query = {"fieldManager": FIELD_MANAGER, "dryRun": "All"}
        return await self._request("post", kind, path, Sent(body), query=query)

    async def ask(self, kind: Kind, body: Object) -> Object:
        """Post a review, which the API server answers and does not keep; a follower may ask, too."""
        return await self._request("post", kind, kind.path(), Sent(body))

    async def replace(self, kind: Kind, body: Object) -> Object:
        """Replace an object; Conflict where its resourceVersion is not the one in ``body``."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"])
        return await self._write("put", kind, path, Sent(body), query={"fieldManager": FIELD_MANAGER})

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Object | None:
        """Delete exactly this uid, else Conflict; returns it on its way out, or None: it is gone."""
        body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            left = await self._write("delete", kind, kind.path(namespace, name), Sent(body))
        except NotFound:
            return None
        return left if left.get("kind") == kind.kind else None

    async def _write(self, verb: str, kind: Kind, path: str, sent: Sent, **how: Any) -> Object:
        self.fence()
        try:
            result = await self._request(verb, kind, path, sent, **how)
            if verb == "delete":
                result["kind"]  # of the object, or a Status
            elif not VERSION.fullmatch(result["metadata"]["resourceVersion"]):
                raise ValueError("it has no resourceVersion")
        except (ValueError, TypeError, LookupError) as error:
            raise Unavailable(f"{verb} {path}: what was answered is no object: {error}") from error
        except Rejected as error:
            if for_good(error):
                self.on_refused(kind)
            raise
        self.on_write(verb, kind)
        return result

    async def _request(
        self,
        verb: str,
        kind: Kind,
        path: str,
        sent: Sent = NOTHING,
        *,
        query: dict[str, Any] | None = None,
        accept: str = "",
        times: int = 1,
    ) -> Object:
        """The answer, which may take so many times as long as others."""
        asked = time.time()
        with self._translated(verb, kind, path):
            answer = await self._dynamic.request(
                "get" if verb == "list" else verb,
                path,
                body=sent.content,
                query_params=list((query or {}).items()),
                header_params={"Accept": accept} if accept else {},
                content_type=sent.media_type,
                serialize=False,
                _request_timeout=times * self.request_seconds,
            )
            response: Object = read_json(await answer.read())
        # Read first: a page that is no JSON is a proxy's, with the proxy's time.
        self.on_date(str(answer.headers.get("Date", "")), asked)
        return response

    @contextlib.contextmanager
    def _translated(self, verb: str, kind: Kind, path: str) -> Iterator[None]:
        """A request: who listens to answers is told of it, and its errors are the operator's own."""
        try:
            yield
        except DynamicApiError as error:
            failed = _translate(verb, path, error)
            if error.status == http.client.UNAUTHORIZED:
                self._doubt_credentials()
            self.on_answer(verb, kind, failed)
            raise failed from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            late = isinstance(error, TimeoutError)
            what = f"no answer in {self.request_seconds:g} s" if late else f"{type(error).__name__} {error}"
            failed = (TooSlow if late else Unreachable)(f"{verb} {path}: {what}")
            self._doubt_credentials()
            self.on_answer(verb, kind, failed)
            raise failed from error
        except ValueError as error:  # the answer is no JSON, e.g. a page of a load balancer, or torn
            failed = Unavailable(f"{verb} {path}: {type(error).__name__} {error}")
            self.on_answer(verb, kind, failed)
            raise failed from error
        self.on_answer(verb, kind, None)


_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that a YAML reader refuses or takes for a line's end, and JSON's writer leaves as they are."""


def apply_text(body: Object) -> str:
    """The body of a server-side apply: JSON that a YAML reader takes, whatever texts are in it.

    The API server reads these bodies alone as YAML, which has no pairs of escapes: a character outside the
    Basic Multilingual Plane goes out as it is. Half a pair, of which no reader makes a character, becomes
    U+FFFD, as in a body that is read as JSON.
    """
    text = HALVES.sub("\ufffd", json.dumps(body, ensure_ascii=False))
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _summary(error: DynamicApiError) -> str:
    """Text of the answer; the body need not be the API server's own."""
    try:
        return str(error.summary() if error.body else error.reason).strip()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return str(error.reason)


_BY_RBAC = re.compile(r"cannot \w+ resource")
"""Text of the API server on a missing right, not on a quota or an admission plugin."""

_BY_WEBHOOK = re.compile(r"admission webhook .* denied the request|ValidatingAdmissionPolicy")
"""Text of the API server on a refusal by the cluster's own policies, with any HTTP status."""


def _translate(verb: str, path: str, error: DynamicApiError) -> OperatorError:
    text = f"{verb} {path}: HTTP {error.status} {_summary(error)}"
    if _BY_WEBHOOK.search(text):
        return NotAllowed(text)
    if error.status == 404:
        return NotFound(text)
    if error.status in (409, 412):  # nothing is in the way of a read: it is tried again
        return Unavailable(text) if verb in ("get", "list", "watch") else Conflict(text)
    if error.status == 410:
        return Expired(text)
    if error.status == 500 and "Internal error occurred" in text:
        return ServerInternalError(text)
    if error.status in (401, 429) or error.status is None or error.status >= 500:
        return Unavailable(text)
    if error.status == 403 and _BY_RBAC.search(text):
        return Forbidden(text)
    if error.status == 403:
        fix = "raise that ResourceQuota, or ask for less"
        return NotAllowed(f"{text}. To fix: {fix}" if OVER_QUOTA in text else text)
    return Rejected(text)


async def is_missing(cluster: Cluster, namespace: str) -> bool:
    """True if the API server does not know ``namespace``; False also where the account may not ask."""
    try:
        await cluster.get(NAMESPACE, "", namespace)
    except NotFound:
        return True
    except Rejected:
        return False
    return False
