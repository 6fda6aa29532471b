"""The connection to an API server: its credentials, requests, and errors in the client's own words."""

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

from ballast.client.errors import (
    AlreadyExists,
    BallastError,
    Forbidden,
    LoggedOut,
    NotConnected,
    NotFound,
    Refused,
)

try:
    import aiohttp
    import yaml
    from kubernetes.aio import client as kubernetes_client
    from kubernetes.aio import config as kubernetes_config
    from kubernetes.aio.dynamic import DynamicClient
    from kubernetes.aio.dynamic.exceptions import DynamicApiError
except ModuleNotFoundError as error:  # pragma: no cover - an installation without the extra
    raise ModuleNotFoundError(
        f"ballast.client needs the package {error.name}. To fix: pip install 'ballast-client[cluster]'",
        name=error.name,
    ) from error

MOST_LINE = 2**22
"""Bytes of a line of a log or of an event, after which it is cut."""

MOST_LEVELS = 100
"""Nesting of an answer, with the levels of the list and the object around a value."""

MOST_OF_A_PAGE, LEAST_OF_A_PAGE = 500, 25
"""Items of a list that are asked for at a time; the fewest, where the API server is slow."""

MOST_OF_A_KUBECONFIG = 2**23
"""Bytes of a file, of thousands of clusters."""

_MOST_MERGED = 10_000

LATE_FIX = "check the connection; of a busy API server ask for less (one namespace), or later"
"""Remedy for an answer that did not come in time."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def checked(name: str, what: str) -> str:
    """``name``, which an object can have: it becomes a part of a URL.

    Raises:
        NotFound: none can.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NotFound(
            f"{name!r:.80} can be no {what}'s name. To fix: use lower case letters, digits and hyphens"
        )
    return name


def missing(namespace: str) -> str:
    """The message for a user about a namespace that does not exist, with what to change."""
    return (
        f"there is no namespace {namespace}. To fix: kubectl create namespace {namespace}, or name another "
        "(kubectl get namespaces)"
    )


def in_pod() -> bool:
    """True if this process runs in a pod with a service account."""
    return _ACCOUNT.exists()


def _files(kubeconfigs: str) -> list[Path]:
    """Files of the list that exist. As in the loaders of the Kubernetes clients, a user may have no home."""
    files = [Path(os.path.expanduser(file)) for file in kubeconfigs.split(os.pathsep) if file]  # noqa: PTH111
    return [file for file in files if file.exists()]


_TOLD = (yaml.YAMLError, ValueError, OSError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Loader that refuses merges of merges, which multiply the keys of a mapping on each line."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_MERGED:
            raise ValueError(f"a mapping has more than {_MOST_MERGED} keys, with merged ones")


@contextlib.contextmanager
def kubeconfig_errors(name: str, refusal: type[Exception]) -> Iterator[Any]:
    """Context in which a file that is no kubeconfig, or far too large for one, is a ``refusal``, in words.

    The loaders of the Kubernetes clients let most errors through, take minutes for tens of megabytes, and
    have no end for merges of merges: so the files are read here first.

    Yields:
        The current context; of several files the first that is stated, as kubectl has it; None: none is.
    """
    try:
        context = None
        for file in filter(Path.is_file, _files(name)):  # a pipe can be read once only
            if file.stat().st_size > MOST_OF_A_KUBECONFIG:
                raise ValueError(f"more than {MOST_OF_A_KUBECONFIG >> 20} MiB")
            found = yaml.load(file.read_text("utf-8"), _Loader) or {}
            context = context or found.get("current-context")
        yield context
    except (TypeError, AttributeError, LookupError, *_TOLD) as error:
        why = error if isinstance(error, _TOLD) else "it has no clusters"
        raise refusal(f"{name} is not a kubeconfig: {why}") from error


def _has_credentials(found: Any) -> bool:
    return bool(found.api_key or found.cert_file)


async def configuration(kubeconfig: str | None, *, before: Any = None) -> Any:
    """Address and credentials by a file, ``$KUBECONFIG``, the pod's account, or ``~/.kube/config``.

    ``before``: what it was, where it is read again: then of the same context, whichever is current now.

    Raises:
        kubernetes.aio.config.ConfigException: none of them can be used, or there are no credentials any more.
    """
    found = kubernetes_client.Configuration()
    if kubeconfig is None and not os.environ.get("KUBECONFIG") and in_pod():
        kubernetes_config.load_incluster_config(client_configuration=found)
    else:
        name = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        if not _files(name):
            raise kubernetes_config.ConfigException(f"there is no kubeconfig: {name} does not exist")
        with kubeconfig_errors(name, kubernetes_config.ConfigException) as context:
            found.context = context if before is None else before.context
            try:
                await kubernetes_config.load_kube_config(
                    config_file=name, context=found.context, client_configuration=found, persist_config=False
                )
            except aiohttp.ClientError as error:
                raise kubernetes_config.ConfigException(f"{name}: its provider of tokens: {error}") from error
        # The loader goes on where a plugin fails, and an API server answers nobody in particular with 403.
        if before is not None and _has_credentials(before) and not _has_credentials(found):
            raise kubernetes_config.ConfigException(
                f"{name} has no credentials now, or its plugin gives none"
            )
    # What the environment says of proxies is looked up here. With trust_env, aiohttp asks a thread for it and
    # for ~/.netrc at each request, which on a busy event loop takes longer than the request.
    found.client_session_kwargs = {"trust_env": False}
    if not found.proxy:
        found.proxy = _proxy(urllib.parse.urlsplit(found.host))
    return found


def reaches_itself(host: str) -> bool:
    """True if the name or address of a host is this machine's own, within itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _proxy(url: urllib.parse.SplitResult) -> str | None:
    """The environment's before an address; as in Go's programs none before this machine's own.

    NO_PROXY may have networks.
    """
    host, proxies = url.hostname, urllib.request.getproxies()
    if not host or reaches_itself(host) or urllib.request.proxy_bypass(host):
        return None
    for part in proxies.get("no", "").split(","):
        with contextlib.suppress(ValueError):  # a name, of which the line above knows
            if ipaddress.ip_address(host) in ipaddress.ip_network(part.strip(), strict=False):
                return None
    proxy = proxies.get(url.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


class Connection:
    """One API server. It is connected to at the first request.

    Args:
        kubeconfig: a file; None: ``$KUBECONFIG``, else the pod's account, else ``~/.kube/config``.
        timeout: seconds for an answer.

    Attributes:
        date: when the API server gave its last answer, as HTTP has it; empty: it did not say.
    """

    def __init__(self, kubeconfig: str | None, timeout: float) -> None:
        self._kubeconfig, self._timeout = kubeconfig, timeout
        self._api: Any = None
        self._connecting = asyncio.Lock()
        self.date = ""

    async def close(self) -> None:
        """Close what is open."""
        if self._api is not None:
            await self._api.close()
            self._api = None

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        patch: str = "",
    ) -> Any:
        """The JSON of an answer.

        Args:
            verb: get, post, patch or delete.
            path: of the API server.
            query: options.
            body: what is sent.
            patch: media type of ``body``, of a patch.

        Raises:
            BallastError: it was refused, or there was none.
        """
        answer = await self._open(verb, path, query, body, patch, self._timeout)
        try:
            return read_json(await answer.read(), path)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error

    async def items(
        self, path: str, query: Mapping[str, str] | None = None, *, most: int = 0
    ) -> AsyncGenerator[Any, None]:
        """The items of a list, asked for in pages: in smaller ones where one does not come in time.

        Args:
            path: of the API server.
            query: options, as a labelSelector.
            most: so many at most; 0: all.

        Raises:
            BallastError: it was refused, or there was none.
        """
        asked, size, read = dict(query or {}), MOST_OF_A_PAGE, 0
        while True:
            limit = min(size, most - read) if most else size
            try:
                page = await self.request("get", path, query={**asked, "limit": str(limit)})
            except NotConnected as error:
                size = smaller_page(limit, error)
                continue
            for item in page.get("items") or ():
                yield item
                read += 1
            asked["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not asked["continue"] or (most and read >= most):
                return

    async def lines(
        self, path: str, query: Mapping[str, str], *, silence: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come, each without its end.

        Args:
            path: of the API server.
            query: options.
            silence: seconds without data after which the connection counts as lost.

        Raises:
            BallastError: it was refused, or the connection was lost.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=silence)
        answer = await self._open("get", path, query, None, "", limits)
        rest = b""
        try:
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > MOST_LINE:
                    yield rest
                    rest = b""
            if rest:
                yield rest
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error
        finally:
            answer.close()

    async def _open(
        self, verb: str, path: str, query: Mapping[str, str] | None, body: Any, patch: str, limits: Any
    ) -> Any:
        async with self._connecting:
            try:
                self._api = self._api or kubernetes_client.ApiClient(await configuration(self._kubeconfig))
            except kubernetes_config.ConfigException as error:
                raise NotConnected(
                    f"{error}. To fix: give a kubeconfig, or set KUBECONFIG; `ballast up` starts a cluster "
                    "here and prints its file"
                ) from error
        asked = {
            "body": body,
            "query_params": list((query or {}).items()),
            "content_type": patch or None,
            "serialize": False,
            "_request_timeout": limits,
        }
        try:
            try:
                answer = await DynamicClient(self._api).request(verb, path, **asked)
            except DynamicApiError as error:
                if error.status != 401 or not await self._log_in_again():
                    raise
                answer = await DynamicClient(self._api).request(verb, path, **asked)
            self.date = str(answer.headers.get("Date", ""))
            return answer
        except DynamicApiError as error:
            raise _translated(path, error) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error
        except ValueError as error:  # NaN in a body, or an address that is none
            raise Refused(f"{path}: {error}") from error

    async def _log_in_again(self) -> bool:
        """Read the token again: a cloud's plugin makes one for minutes. Says whether it can be read."""
        with contextlib.suppress(kubernetes_config.ConfigException):
            known = self._api.configuration
            found = await configuration(self._kubeconfig, before=known)
            known.api_key, known.refresh_api_key_hook = found.api_key, found.refresh_api_key_hook
            return True
        return False

    def _unreachable(self, path: str, error: Exception) -> NotConnected:
        if isinstance(error, TimeoutError):
            return NotConnected(f"no answer to {path} in {self._timeout:g} s. To fix: {LATE_FIX}")
        return NotConnected(
            f"no answer to {path}: {type(error).__name__} {error}. "
            "To fix: check the kubeconfig and the connection"
        )


def smaller_page(size: int, error: Exception) -> int:
    """Number of items to ask for after a page of ``size`` was late.

    Raises:
        Exception: ``error``: of another cause, or of the smallest page.
    """
    if not isinstance(error.__cause__, TimeoutError) or size <= LEAST_OF_A_PAGE:
        raise error
    return max(LEAST_OF_A_PAGE, size // 4)


def _translated(path: str, error: Any) -> BallastError:
    try:
        said = str(json.loads(error.body)["message"])
        served = "could not find the requested resource" not in said
    except (ValueError, LookupError, TypeError, RecursionError):
        said, served = str(error.reason), False  # a group that is not served is answered with plain text
    text, status = f"{said} (HTTP {error.status})", error.status
    if status == 404 and not served:
        return NotFound(f"{text}. To fix: install Ballast's custom resource definitions (`ballast crds`)")
    if status == 404 and (absent := re.match(r'namespaces "(.*)" not found', said)):
        return NotFound(missing(absent[1]))
    if status == 404 and "/trainingjobs/" in path:
        return NotFound(f"{text}. To fix: name a job that `ballast jobs` lists, and its namespace")
    if status == 404:
        return NotFound(text)
    if status == 409 and "already exists" in said:
        return AlreadyExists(f"{text}. To fix: delete it, or choose another name")
    if status == 401:
        return LoggedOut(f"{text}. To fix: log in again, or give another kubeconfig")
    if status == 403 and re.search(r"cannot \w+ resource", said):
        return Forbidden(f"{text}. To fix: ask for the right, or name a namespace where you have it")
    if status is None or status == 429 or status >= 500:
        return NotConnected(f"{path}: {text}. To fix: try again")
    if "strict decoding error: unknown field" in said:
        text += ". To fix: correct its name, or the definitions are older: see `ballast doctor`"
    return Refused(text)


def read_json(data: bytes, path: str) -> Any:
    """A value of JSON, whatever it is nested in.

    Raises:
        NotConnected: it is none.
    """
    try:
        text = data.decode()
        try:
            return json.loads(text)
        except RecursionError:  # an object of somebody may hold JSON of any depth
            return json.loads(truncate_depth(text))
    except ValueError as error:
        raise NotConnected(f"{path}: what was answered is no JSON: {error}") from error


def truncate_depth(text: str) -> str:
    """JSON with null in place of the values that are nested deeper than :data:`MOST_LEVELS`."""
    parts, kept_from, level = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("[", "{"):
            level += 1
            if level == MOST_LEVELS + 1:
                parts.append(text[kept_from : token.start()])
        elif token[0] in ("]", "}"):
            if level == MOST_LEVELS + 1:
                parts.append("null")
                kept_from = token.end()
            level -= 1
    # A text that ends below that is torn: what is returned is no JSON either.
    return "".join([*parts, text[kept_from:] if level <= MOST_LEVELS else ""])
