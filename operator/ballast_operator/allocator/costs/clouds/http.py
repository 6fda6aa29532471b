"""One GET within limits: time, size, no redirect, no compression, certificates checked."""

from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp

from ballast_operator.allocator.costs.clouds.source import SourceUnavailableError

REQUEST_SECONDS = 30.0
"""A request that takes longer has failed."""

CHUNK_BYTES = 65_536


def session() -> aiohttp.ClientSession:
    """For the requests of one refresh; proxies as the environment states them (HTTPS_PROXY)."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        trust_env=True,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def get_text(
    client: aiohttp.ClientSession,
    url: str,
    *,
    params: Mapping[str, str],
    most_bytes: int,
    headers: Mapping[str, str] | None = None,
) -> str:
    """The body, which is UTF-8.

    Raises:
        SourceUnavailableError: no answer in time, another status than 200, or a body above ``most_bytes``.
    """
    host = urlsplit(url).hostname
    sent = {"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})}
    try:
        async with client.get(url, params=params, headers=sent, allow_redirects=False) as response:
            if response.status != 200:
                raise SourceUnavailableError(
                    f"{host} answers with status {response.status}{_advice(response.status)}"
                )
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise SourceUnavailableError(f"{host} answers compressed, which was not asked for")
            body = bytearray()
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                body += chunk
                if len(body) > most_bytes:
                    raise SourceUnavailableError(f"{host} answers with more than {most_bytes} bytes")
        return body.decode("utf-8")
    except TimeoutError as error:
        raise SourceUnavailableError(
            f"{host} has not answered within {REQUEST_SECONDS:g} s. "
            "To fix: let the operator's pod reach it by HTTPS, or set HTTPS_PROXY"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise SourceUnavailableError(
            f"{host} cannot be reached: {type(error).__name__}. "
            "To fix: let the operator's pod reach it by HTTPS, or set HTTPS_PROXY"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceUnavailableError(f"{host} answers with what is not UTF-8") from error


def _advice(status: int) -> str:
    if status in (401, 403):
        return ". To fix: see to the operator's credentials, and what they allow"
    return ""
