"""Parsers of places, prices and clouds: fields of jobs, policies and status, and what clouds answer."""

from ballast_operator.allocator.saved_state import decode as read_saved_state
from ballast_operator.api.read import (
    InvalidObject,
    read_cluster_policy,
    read_job_status,
    read_training_job,
)
from ballast_operator.cli.allocate.command import read_problem
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.prices.clouds.aws import spot_price
from ballast_policies.prices.clouds.azure import retail_price
from ballast_policies.prices.clouds.gcp import GcpPrice, gpu_price, read_skus
from ballast_policies.prices.clouds.wanted import AwsSpotPrice, AzurePrice
from ballast_policies.prices.offers import PriceLogError

from tests.fuzz import money_seeds as seeds
from tests.fuzz.parser import Parser, compressed, document, object_with, text

SKU = "0000-AAAA-0001"


def _read_status(found: object) -> object:
    """What a status says about the gang is asked by every loop, whatever it says."""
    status = read_job_status(found)
    if status.allocation is not None:
        gang = status.allocation
        assert gang.placement is not None
        assert gang.by_pool is not None
        assert gang.on_nodes_by_pool is not None
    return status


def _read_aws(rows: object) -> float:
    wanted = AwsSpotPrice(region="us-east-1", instance_type="p2.xlarge")
    price = spot_price(rows if isinstance(rows, list) else [rows], wanted)
    assert price > 0
    return price


def _read_azure(content: str) -> float:
    price = retail_price(content, AzurePrice(region="eastus2", vm_size=seeds.VM_SIZE, spot=True))
    assert price > 0
    return price


def _read_gcp(content: str) -> float:
    page = read_skus(content, [SKU], currency="USD")
    return gpu_price(page.prices, GcpPrice(skus=((SKU, 2.0),)))


MONEY_PARSERS = (
    Parser(
        name="job-placement",
        make=object_with(seeds.JOB, "spec"),
        read=read_training_job,
        errors=(InvalidObject,),
    ),
    Parser(
        name="script-job",
        make=object_with(seeds.SCRIPT, "spec"),
        read=read_training_job,
        errors=(InvalidObject,),
    ),
    Parser(
        name="cluster-policy-money",
        make=object_with(seeds.POLICY, "spec"),
        read=read_cluster_policy,
        errors=(InvalidObject,),
    ),
    Parser(
        name="job-status-parts",
        make=object_with({"status": seeds.STATUS}, "status"),
        read=_read_status,
        errors=(ValueError,),
    ),
    Parser(
        name="saved-layers", make=compressed(seeds.SAVED_STATE), read=read_saved_state, errors=(ValueError,)
    ),
    Parser(name="allocate-generate", make=text(seeds.GENERATED), read=read_problem, errors=(ProblemError,)),
    Parser(
        name="aws-answer",
        make=document(seeds.AWS_ROWS),
        read=_read_aws,
        errors=(PriceLogError,),
    ),
    Parser(name="azure-answer", make=text(seeds.AZURE_PAGE), read=_read_azure, errors=(PriceLogError,)),
    Parser(name="gcp-answer", make=text(seeds.gcp_page(SKU)), read=_read_gcp, errors=(PriceLogError,)),
)
