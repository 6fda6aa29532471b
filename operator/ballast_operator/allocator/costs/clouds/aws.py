"""AWS's history of spot prices, by boto3, whose own chain finds credentials."""

import asyncio
import datetime
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ballast_policies.prices.clouds.aws import PRODUCTS, spot_price
from ballast_policies.prices.clouds.wanted import AwsSpotPrice

from ballast_operator.allocator.costs.clouds.source import Answers, SourceUnavailableError, one_by_one

PAGE_ROWS = 1000
"""Rows of one answer."""

MOST_ROWS = 20 * PAGE_ROWS
"""Rows of one instance type: it has one for each zone and product."""

CONNECT_SECONDS, READ_SECONDS = 5, 10


class AwsSpotHistory:
    """One question for each instance type and region, in a thread of its own: boto3 waits for answers.

    Args:
        endpoint: another address than AWS's own.
    """

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
        """What AWS has of the instance type at present.

        Raises:
            SourceUnavailableError: there is no SDK, there are no credentials, or AWS does not answer.
        """
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
