"""Azure's and Google's lists over HTTP, from a server in this process: what is asked, and what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from ballast_operator.allocator.costs import cloud_lists as gcp
from ballast_operator.allocator.costs.cloud_lists import (
    MOST_FAILURES,
    AwsSpotHistory,
    AzureRetailPrices,
    GcpCatalog,
    SourceUnavailableError,
)
from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice, GcpPrice
from ballast_policies.prices.offers import PriceLogError

from tests.support.servers import Answer, served
from tests.support.waiting import WAIT_SECONDS

ANSWERS = Path(__file__).parents[4] / "policies" / "prices" / "clouds" / "answers"
AZURE = (ANSWERS / "azure-eastus2-NCC40ads_H100_v5.json").read_text()
GCP = (ANSWERS / "gcp-skus.json").read_text()
H100 = AzurePrice(region="eastus2", vm_size="Standard_NCC40ads_H100_v5", spot=True)
A100 = GcpPrice(skus=(("039F-D0DA-4055", 1.0),))


async def azure(answer: Answer) -> float | Exception:
    async with served(answer) as url:
        return (await AzureRetailPrices(url).prices([H100]))[H100]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


async def test_azure_is_asked_for_one_machine_in_the_feeds_currency():
    """Without credentials; the answer is the price of a machine."""
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query)
        return web.Response(text=AZURE)

    assert await azure(answer) == 1.419034
    assert asked[0]["currencyCode"] == "'USD'"
    assert "armSkuName eq 'Standard_NCC40ads_H100_v5'" in asked[0]["$filter"]


async def fails(request: web.Request) -> web.Response:
    return web.Response(status=503)


async def redirects(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://169.254.169.254/latest/meta-data")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100):
        await response.write(b" " * 65_536)
    return response


async def compressed(request: web.Request) -> web.Response:
    return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})


async def not_text(request: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe")


async def hangs_up(request: web.Request) -> web.Response:
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fails, "status 503"),
        (redirects, "status 302"),
        (endless, "more than 2097152 bytes"),
        (compressed, "compressed"),
        (not_text, "not UTF-8"),
        (hangs_up, "cannot be reached"),
    ],
)
async def test_a_server_that_does_not_behave_is_unavailable(answer: Answer, reason: str):
    """No redirect is followed, and no more is read than a list has."""
    found = await azure(answer)
    assert isinstance(found, SourceUnavailableError)
    assert reason in str(found)


async def test_a_list_that_is_down_is_not_asked_for_every_machine():
    """After some failures in a row the rest have the same reason."""
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(status=500)

    wanted = [AzurePrice(region="eastus", vm_size=f"Standard_N{n}", spot=True) for n in range(20)]
    async with served(answer) as url:
        found = await AzureRetailPrices(url).prices(wanted)
    assert len(asked) == MOST_FAILURES
    assert found.keys() == set(wanted)


async def test_googles_list_is_walked_through_until_all_skus_are_found(monkeypatch: pytest.MonkeyPatch):
    """Page by page, by the token; the key is in a header, where no log and no error shows it."""
    monkeypatch.setenv(gcp.KEY, "secret")
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        first = "pageToken" not in request.query
        return web.Response(text='{"skus": [], "nextPageToken": "APKC"}' if first else GCP)

    async with served(answer) as url:
        found = await GcpCatalog(url).prices([A100])
    assert found == {A100: 2.933908}
    assert [request.query.get("pageToken") for request in asked] == [None, "APKC"]
    assert asked[0].headers["X-Goog-Api-Key"] == "secret"
    assert "secret" not in str(asked[0].url)


async def test_a_currency_that_google_does_not_know_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    """Each is a list of its own; the pool that names it is told."""
    monkeypatch.setenv(gcp.KEY, "secret")
    unknown = GcpPrice(skus=A100.skus, currency="AAA")

    async def answer(request: web.Request) -> web.Response:
        known = request.query["currencyCode"] == "USD"
        return web.Response(text=GCP.replace("APKCS1HVa0YpwgyTFbqb", ""), status=200 if known else 400)

    async with served(answer) as url:
        found = await GcpCatalog(url).prices([A100, unknown])
    assert found[A100] == 2.933908
    assert "answers with status 400" in str(found[unknown])


async def test_a_sku_that_is_not_listed_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    """The whole list was looked through then; one that never ends is refused."""
    monkeypatch.setenv(gcp.KEY, "secret")
    monkeypatch.setattr(gcp, "MOST_PAGES", 3)
    unknown = GcpPrice(skus=(("0000-0000-0000", 1.0),))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=GCP.replace("APKCS1HVa0YpwgyTFbqb", ""))

    async def endless_list(request: web.Request) -> web.Response:
        return web.Response(text=GCP)

    async with served(answer) as url:
        found = await GcpCatalog(url).prices([A100, unknown])
    assert found[A100] == 2.933908
    assert isinstance(found[unknown], PriceLogError)
    async with served(endless_list) as url:
        found = await GcpCatalog(url).prices([unknown])
    assert "more than 3 pages" in str(found[unknown])


def test_without_a_key_googles_own_credentials_are_used(monkeypatch: pytest.MonkeyPatch):
    """Those of the service account, wherever google-auth finds them."""

    class Account:
        token = "token"

        def refresh(self, request: object) -> None:
            """It has a token."""

    import google.auth

    monkeypatch.delenv(gcp.KEY, raising=False)
    monkeypatch.setattr(google.auth, "default", lambda scopes: (Account(), "project"))
    assert gcp.credentials() == {"Authorization": "Bearer token"}


def test_without_credentials_or_the_sdk_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch):
    """Both the extra and the key are named."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    def none(scopes: object) -> None:
        raise DefaultCredentialsError

    monkeypatch.delenv(gcp.KEY, raising=False)
    monkeypatch.setattr(google.auth, "default", none)
    with pytest.raises(SourceUnavailableError, match=r"workload identity"):
        gcp.credentials()
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(SourceUnavailableError, match=r"install ballast-operator\[gcp\]"):
        gcp.credentials()


def wanted(instance_type: str = "g4dn.xlarge", zone: str = "us-east-1a") -> AwsSpotPrice:
    return AwsSpotPrice(region="us-east-1", zone=zone, instance_type=instance_type)


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    """The address of moto's server, on this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the environment variables of AWS's SDKs give them, and none from this machine, at any load."""
    for limit in ("CONNECT_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(gcp, limit, WAIT_SECONDS)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.slow
async def test_prices_are_read_by_zone_and_over_all_zones(aws: str, credentials: None):
    """An instance type that AWS does not have leaves the others."""
    asked = [wanted(), wanted(zone=""), wanted("p9.huge")]
    found = await AwsSpotHistory(aws).prices(asked)
    assert found[asked[0]] == pytest.approx(1e-5)  # the one price that moto has
    assert found[asked[1]] == pytest.approx(1e-5)
    assert isinstance(found[asked[2]], PriceLogError)


@pytest.mark.slow
async def test_without_credentials_the_condition_says_what_to_give(aws: str, monkeypatch: pytest.MonkeyPatch):
    """Neither a stop nor a wait for a metadata service that there is not."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = await AwsSpotHistory(aws).prices([wanted()])
    assert isinstance(found[wanted()], SourceUnavailableError)
    assert "NoCredentialsError" in str(found[wanted()])
    assert "(IRSA, EKS Pod Identity)" in str(found[wanted()])


@pytest.mark.slow
async def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    """An image of one's own may be without it."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    found = await AwsSpotHistory().prices([wanted()])
    assert "install ballast-operator[aws]" in str(found[wanted()])
