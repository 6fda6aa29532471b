"""AWS's spot prices by boto3, from a server that speaks AWS's API."""

import sys
from collections.abc import Iterator

import pytest
from ballast_operator.allocator.costs.cloud_lists import AwsSpotHistory, SourceUnavailableError
from ballast_policies.prices.clouds import AwsSpotPrice
from ballast_policies.prices.offers import PriceLogError

pytestmark = pytest.mark.slow  # boto3 reads its descriptions of AWS's API


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
    """As the environment variables of AWS's SDKs give them, and none from this machine."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


async def test_prices_are_read_by_zone_and_over_all_zones(aws: str, credentials: None):
    """An instance type that AWS does not have leaves the others."""
    asked = [wanted(), wanted(zone=""), wanted("p9.huge")]
    found = await AwsSpotHistory(aws).prices(asked)
    assert found[asked[0]] == pytest.approx(1e-5)  # the one price that moto has
    assert found[asked[1]] == pytest.approx(1e-5)
    assert isinstance(found[asked[2]], PriceLogError)


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


async def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    """An image of one's own may be without it."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    found = await AwsSpotHistory().prices([wanted()])
    assert "install ballast-operator[aws]" in str(found[wanted()])
