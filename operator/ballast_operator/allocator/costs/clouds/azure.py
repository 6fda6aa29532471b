"""Azure's Retail Prices API: public, without credentials."""

import asyncio
from collections.abc import Sequence

from ballast_policies.prices.clouds.azure import PAGE, filter_of, retail_price
from ballast_policies.prices.clouds.wanted import AzurePrice

from ballast_operator.allocator.costs.clouds.http import get_text, session
from ballast_operator.allocator.costs.clouds.source import Answers, one_by_one

URL = "https://prices.azure.com/api/retail/prices"


class AzureRetailPrices:
    """One request for each VM size and region: a page has all that counts."""

    refresh_seconds = 3600.0

    def __init__(self, url: str = URL) -> None:
        self._url = url

    async def prices(self, wanted: Sequence[AzurePrice]) -> Answers:
        """See :class:`PriceSource`."""
        async with session() as client:

            async def ask(one: AzurePrice) -> float:
                params = {"$filter": filter_of(one), "currencyCode": f"'{one.currency}'"}
                text = await get_text(client, self._url, params=params, most_bytes=PAGE.most_bytes)
                return await asyncio.to_thread(retail_price, text, one)

            return await one_by_one(wanted, ask)
