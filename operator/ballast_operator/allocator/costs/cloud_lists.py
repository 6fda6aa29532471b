"""Price lists of AWS, Azure and Google Cloud, asked within limits of time and size."""

import asyncio
import datetime
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
from ballast_policies.prices.clouds import (
    AZURE_PAGE,
    GCP_PAGE,
    PRODUCTS,
    AwsSpotPrice,
    AzurePrice,
    GcpPrice,
    filter_of,
    gpu_price,
    read_skus,
    retail_price,
    spot_price,
)
from ballast_policies.prices.offers import PriceLogError

REQUEST_SECONDS = 30.0
"""A request that takes longer has failed."""

CHUNK_BYTES = 65_536


def session() -> aiohttp.ClientSession:
    """Session for the requests of one refresh; proxies as the environment states them (HTTPS_PROXY)."""
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
                fix = ". To fix: see to the operator's credentials, and what they allow"
                advice = fix if response.status in (401, 403) else ""
                raise SourceUnavailableError(f"{host} answers with status {response.status}{advice}")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise SourceUnavailableError(f"{host} answers compressed, which was not asked for")
            body = bytearray()
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                body += chunk
                if len(body) > most_bytes:
                    raise SourceUnavailableError(f"{host} answers with more than {most_bytes} bytes")
        return body.decode("utf-8")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        what = f"cannot be reached: {type(error).__name__}"
        if isinstance(error, TimeoutError):
            what = f"has not answered within {REQUEST_SECONDS:g} s"
        fix = "let the operator's pod reach it by HTTPS, or set HTTPS_PROXY"
        raise SourceUnavailableError(f"{host} {what}. To fix: {fix}") from error
    except UnicodeDecodeError as error:
        raise SourceUnavailableError(f"{host} answers with what is not UTF-8") from error


MOST_FAILURES = 3
"""Requests that fail one after the other: then the source is not asked for the rest."""


class SourceUnavailableError(Exception):
    """A cloud does not answer, or refuses; the text says what, and what to do."""


Answers = Mapping[Any, float | PriceLogError | SourceUnavailableError]
"""Query -> its price in the list's currency, or the reason that there is none."""

W = TypeVar("W")


class PriceSource(Protocol):
    """A price list of a cloud; ``refresh_seconds``: how often it is asked for prices."""

    refresh_seconds: float

    async def prices(self, wanted: Sequence[Any]) -> Answers:
        """The present prices of ``wanted``. Raises SourceUnavailableError: no price could be read at all."""
        ...


async def one_by_one(wanted: Sequence[W], ask: Callable[[W], Awaitable[float]]) -> Answers:
    """Answers of requests that do not depend on each other: one that fails leaves the others."""
    found: dict[W, float | PriceLogError | SourceUnavailableError] = {}
    failures = 0
    for number, one in enumerate(wanted):
        try:
            found[one] = await ask(one)
            failures = 0
        except PriceLogError as error:
            found[one] = error
            failures = 0
        except SourceUnavailableError as error:
            found[one] = error
            failures += 1
            if failures == MOST_FAILURES:
                found.update(dict.fromkeys(wanted[number + 1 :], error))
                break
    return found


PAGE_ROWS = 1000
"""Rows of one answer."""

MOST_ROWS = 20 * PAGE_ROWS
"""Rows of one instance type: it has one for each zone and product."""

CONNECT_SECONDS, READ_SECONDS = 5, 10


class AwsSpotHistory:
    """A question for each instance type and region, in a thread of its own: boto3 waits for answers."""

    refresh_seconds = 300.0

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aws-prices")
        self._clients: dict[str, Any] = {}

    async def prices(self, wanted: Sequence[AwsSpotPrice]) -> Answers:
        """See :class:`PriceSource`."""
        loop = asyncio.get_running_loop()

        async def ask(one: AwsSpotPrice) -> float:
            return await loop.run_in_executor(self._thread, self._price, one)

        return await one_by_one(wanted, ask)

    def _price(self, wanted: AwsSpotPrice) -> float:
        return spot_price(self._rows(wanted.region, wanted.instance_type), wanted)

    def _rows(self, region: str, instance_type: str) -> list[Any]:
        """AWS's prices of the instance type. Raises SourceUnavailableError: no SDK, credentials or answer."""
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise SourceUnavailableError(
                "boto3 is not installed in the operator's image. To fix: install ballast-operator[aws] there"
            ) from error
        try:
            client = self._clients.get(region)
            if client is None:
                config = Config(
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    retries={"total_max_attempts": 2, "mode": "standard"},
                )
                session = boto3.session.Session(region_name=region)
                client = session.client("ec2", endpoint_url=self._endpoint, config=config)
                self._clients[region] = client
            pages = client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=[instance_type],
                ProductDescriptions=list(PRODUCTS),
                StartTime=datetime.datetime.now(datetime.UTC),  # only the prices that hold now
                PaginationConfig={"PageSize": PAGE_ROWS, "MaxItems": MOST_ROWS},
            )
            return [row for page in pages for row in page.get("SpotPriceHistory") or ()]
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))[:60]
            raise SourceUnavailableError(
                f"AWS refuses in {region}: {code}. To fix: allow the operator's role "
                "ec2:DescribeSpotPriceHistory, and correct region and instanceType"
            ) from error
        except BotoCoreError as error:
            raise SourceUnavailableError(
                f"AWS in {region}: {type(error).__name__}: {str(error)[:200]}. To fix: give the operator's "
                "service account a role (IRSA, EKS Pod Identity), and let its pod reach AWS by HTTPS"
            ) from error


AZURE_URL = "https://prices.azure.com/api/retail/prices"


class AzureRetailPrices:
    """A request for each VM size and region: a page has all that counts."""

    refresh_seconds = 3600.0

    def __init__(self, url: str = AZURE_URL) -> None:
        self._url = url

    async def prices(self, wanted: Sequence[AzurePrice]) -> Answers:
        """See :class:`PriceSource`."""
        async with session() as client:

            async def ask(one: AzurePrice) -> float:
                params = {"$filter": filter_of(one), "currencyCode": f"'{one.currency}'"}
                text = await get_text(client, self._url, params=params, most_bytes=AZURE_PAGE.most_bytes)
                return await asyncio.to_thread(retail_price, text, one)

            return await one_by_one(wanted, ask)


GCP_URL = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
"""The SKUs of Compute Engine."""

KEY = "GOOGLE_API_KEY"
"""Environment variable with an API key; without it, Application Default Credentials are used."""

SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"

MOST_PAGES = 200
"""Pages of a thousand SKUs; Compute Engine has some tens of thousands."""


class GcpCatalog:
    """The list is walked through once for all SKUs of a currency, until they are found."""

    refresh_seconds = 6 * 3600.0

    def __init__(self, url: str = GCP_URL) -> None:
        self._url = url

    async def prices(self, wanted: Sequence[GcpPrice]) -> Answers:
        """See :class:`PriceSource`."""
        found: dict[GcpPrice, float | PriceLogError | SourceUnavailableError] = {}
        headers = await asyncio.to_thread(credentials)
        for currency in sorted({one.currency for one in wanted}):
            ours = [one for one in wanted if one.currency == currency]
            ids = {sku for one in ours for sku, _ in one.skus}
            try:
                prices = await self._list(ids, currency, headers)
            except (PriceLogError, SourceUnavailableError) as error:
                found.update(dict.fromkeys(ours, error))
                continue
            for one in ours:
                try:
                    found[one] = gpu_price(prices, one)
                except PriceLogError as error:
                    found[one] = error
        return found

    async def _list(
        self, ids: set[str], currency: str, headers: Mapping[str, str]
    ) -> dict[str, float | PriceLogError]:
        """Prices of the SKUs ``ids`` that there are."""
        found: dict[str, float | PriceLogError] = {}
        params = {
            "currencyCode": currency,
            "pageSize": "1000",
            "fields": "skus(skuId,pricingInfo),nextPageToken",
        }
        async with session() as client:
            for _ in range(MOST_PAGES):
                text = await get_text(
                    client, self._url, params=params, headers=headers, most_bytes=GCP_PAGE.most_bytes
                )
                page = await asyncio.to_thread(read_skus, text, ids, currency=currency)
                found.update(page.prices)
                if not page.next_token or found.keys() >= ids:
                    return found
                params["pageToken"] = page.next_token
        raise PriceLogError(f"gcp: the list of SKUs has more than {MOST_PAGES} pages")


def credentials() -> dict[str, str]:
    """The header that names us. Raises SourceUnavailableError: no credentials, or no SDK to find them."""
    key = os.environ.get(KEY, "")
    if key:
        return {"X-Goog-Api-Key": key}
    try:
        import google.auth
        import google.auth.transport.requests
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise SourceUnavailableError(
            f"there is no {KEY}, and google-auth is not installed in the operator's image. "
            "To fix: install ballast-operator[gcp] there, or set the key"
        ) from error
    try:
        found, _ = google.auth.default(scopes=[SCOPE])
        found.refresh(google.auth.transport.requests.Request())
    except GoogleAuthError as error:
        raise SourceUnavailableError(
            f"no credentials of Google Cloud ({type(error).__name__}). To fix: bind the operator's service "
            f"account to one of Google's (workload identity), or set {KEY}"
        ) from error
    return {"Authorization": f"Bearer {found.token}"}
