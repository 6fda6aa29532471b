"""AWS's answers: what is read, and what is refused."""

import json

import pytest
from ballast_policies.prices.clouds.aws import parse_aws_prices
from ballast_policies.prices.offers import PriceLogError

ROW = {
    "AvailabilityZone": "us-east-1d",
    "InstanceType": "p2.xlarge",
    "ProductDescription": "Linux/UNIX",
    "SpotPrice": "0.340500",
    "Timestamp": "2020-02-20T23:21:08.000Z",
}


def aws(*rows):
    return json.dumps({"SpotPriceHistory": list(rows)})


def test_an_aws_answer_is_read_as_it_is():
    """Zone, region, price and time of a change; other products are left out."""
    (row,) = parse_aws_prices(aws(ROW, {**ROW, "ProductDescription": "Windows"}), source="f")
    assert (row.region, row.zone, row.instance, row.point.usd) == (
        "us-east-1",
        "us-east-1d",
        "p2.xlarge",
        0.3405,
    )
    assert row.point.time == 1582240868.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"SpotPrice": "NaN"}, "price 'NaN'"),
        ({"SpotPrice": "-1"}, "price '-1'"),
        ({"SpotPrice": "1e999"}, "price '1e999'"),
        ({"SpotPrice": "0"}, "price '0'"),
        ({"SpotPrice": 0.34}, "needs the texts"),
        ({"Timestamp": "yesterday"}, "time 'yesterday'"),
        ({"Timestamp": "2020-02-31T00:00:00Z"}, "day"),
        ({"AvailabilityZone": "../../etc"}, "no availability zone"),
    ],
)
def test_a_wrong_aws_row_is_refused_with_its_place(change, reason):
    """The message names the file, the row, the value and the reason."""
    with pytest.raises(PriceLogError, match=reason) as caught:
        list(parse_aws_prices(aws(ROW, {**ROW, **change}), source="prices.json"))
    assert "prices.json: SpotPriceHistory[1]" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 5000, '{"SpotPriceHistory": {}}', '{"a": NaN}'])
def test_what_is_no_aws_answer_is_refused(text):
    """Whatever it is instead."""
    with pytest.raises(PriceLogError):
        list(parse_aws_prices(text, source="f"))
