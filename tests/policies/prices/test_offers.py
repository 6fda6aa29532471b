"""The catalogue of instances: what is read, and what is refused."""

import pytest
from ballast_policies.prices.offers import PriceLogError, built_in_catalogue, parse_catalogue, usd


@pytest.mark.parametrize(
    "row",
    [
        "aws,a,v100,0,1",
        "aws,a,v100,x,1",
        "aws,a,v100,4",
        "aws,a,v100,4,-1",
        ",a,v100,4,1",
        "aws,a,v100,1,1\naws,a,v100,1,1",
    ],
)
def test_a_wrong_catalogue_is_refused(row):
    """Numbers, columns and repetitions."""
    with pytest.raises(PriceLogError):
        parse_catalogue("cloud,instance,gpu_type,gpus,on_demand_usd_per_hour\n" + row, source="f")


def test_the_built_in_catalogue_reads():
    """With the machines of chapter 6."""
    assert built_in_catalogue()["azure", "NC24rs v3"].gpus == 4
    assert usd("$2.50", where="") == 2.5
