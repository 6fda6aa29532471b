"""Google's Cloud Billing Catalog: with an API key, or the credentials of the operator's service account."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from ballast_policies.prices.clouds.gcp import PAGE, gpu_price, read_skus
from ballast_policies.prices.clouds.wanted import GcpPrice
from ballast_policies.prices.errors import PriceLogError

from ballast_operator.allocator.costs.clouds.http import get_text, session
from ballast_operator.allocator.costs.clouds.source import Answers, SourceUnavailableError

URL = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
"""The SKUs of Compute Engine."""

KEY = "GOOGLE_API_KEY"
"""Environment variable with an API key; without it, Application Default Credentials are used."""

SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"

MOST_PAGES = 200
"""Of a thousand SKUs; Compute Engine has some tens of thousands."""


class GcpCatalog:
    """The list is walked through once for all SKUs of a currency, until they are found."""

    refresh_seconds = 6 * 3600.0

    def __init__(self, url: str = URL) -> None:
        self._url = url

    async def prices(self, wanted: Sequence[GcpPrice]) -> Answers:
        """See :class:`PriceSource`."""
        found: dict[GcpPrice, float | PriceLogError] = {}
        headers = await asyncio.to_thread(credentials)
        for currency in sorted({one.currency for one in wanted}):
            ours = [one for one in wanted if one.currency == currency]
            ids = {sku for one in ours for sku, _ in one.skus}
            try:
                prices = await self._list(ids, currency, headers)
            except PriceLogError as error:
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
                    client, self._url, params=params, headers=headers, most_bytes=PAGE.most_bytes
                )
                page = await asyncio.to_thread(read_skus, text, ids, currency=currency)
                found.update(page.prices)
                if not page.next_token or found.keys() >= ids:
                    return found
                params["pageToken"] = page.next_token
        raise PriceLogError(f"gcp: the list of SKUs has more than {MOST_PAGES} pages")


def credentials() -> dict[str, str]:
    """The header that names us.

    Raises:
        SourceUnavailableError: there are no credentials, or the SDK that finds them is not installed.
    """
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
