"""Prices of offers and of data between regions, and those that held earlier."""

import math

import pytest
from ballast_policies.prices.egress import GB, DataPrices, JobData
from ballast_policies.prices.offers import (
    PriceLogError,
    built_in_catalogue,
    is_plausible,
    parse_catalogue,
    usd,
)


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


@pytest.mark.parametrize("usd", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_price_is_never_plausible(usd):
    assert not is_plausible(usd, None)
    assert not is_plausible(usd, 1.0)


PRICES = DataPrices({("a", "b"): 0.02, ("a", "*"): 0.09, ("*", "c"): 0.05, ("x", "y"): 0.0})


@pytest.mark.parametrize(
    ("origin", "destination", "price"),
    [
        ("a", "b", 0.02),
        ("a", "c", 0.09),
        ("b", "c", 0.05),
        ("b", "a", None),
        ("a", "a", 0.0),
        ("x", "y", 0.0),
    ],
)
def test_the_entry_that_names_most_counts(origin: str, destination: str, price: float | None):
    """Both regions, then where it comes from, then where it goes; inside a region data is free."""
    assert PRICES.of_gb(origin, destination) == price


@pytest.mark.parametrize(("origin", "destination"), [("", "b"), ("a", ""), ("", "")])
def test_no_price_is_made_up_where_a_region_is_not_known(origin: str, destination: str):
    """Not even an entry for all regions says what it costs."""
    assert DataPrices({("*", "*"): 1.0}).of_gb(origin, destination) is None


def test_a_step_and_a_checkpoint_cost_their_bytes():
    """A GB is 2^30 bytes; what is not known costs nothing to move, and has no price to read."""
    data = JobData(region="a", bytes_per_step=GB / 4, checkpoint_bytes=2 * GB)
    assert data.usd_per_step(PRICES, "b") == pytest.approx(0.005)
    assert data.usd_per_step(DataPrices(), "b") is None
    assert data.usd_to_move(PRICES, "a", "b") == pytest.approx(0.04)
    assert data.usd_to_move(PRICES, "", "b") == 0.0
    assert JobData(region="a", bytes_per_step=1.0).usd_to_move(PRICES, "a", "b") == 0.0
