"""Logs of the clouds: what is read, and what is refused."""

import itertools
import json

import numpy as np
import pytest
from ballast_lab.prices.history import Point, PriceSeries, series
from ballast_lab.prices.logs.availability_log import parse_availability
from ballast_lab.prices.logs.azure_prices import parse_azure_prices
from ballast_lab.prices.logs.folder import excerpt, parse_aws_prices, read_market
from ballast_lab.prices.logs.gcp_prices import parse_gcp_prices
from ballast_lab.prices.offers import Pool
from ballast_policies.prices.offers import PriceLogError
from hypothesis import given
from hypothesis import strategies as st

ROW = {
    "AvailabilityZone": "us-east-1d",
    "InstanceType": "p2.xlarge",
    "ProductDescription": "Linux/UNIX",
    "SpotPrice": "0.340500",
    "Timestamp": "2020-02-20T23:21:08.000Z",
}


def aws(*rows):
    return json.dumps({"SpotPriceHistory": list(rows)})


def test_an_azure_table_is_read_by_column():
    """Only changes; an empty cell withdraws the size."""
    text = "Date,NC6,NC6s v3\n2/24/2020,$0.1,$0.6\n2/25/2020,$0.1,\n2/26/2020,$0.2,$0.7\n"
    rows = [(row.instance, row.point.usd) for row in parse_azure_prices(text, region="us_east", source="f")]
    assert rows == [("NC6", 0.1), ("NC6s v3", 0.6), ("NC6s v3", None), ("NC6", 0.2), ("NC6s v3", 0.7)]


@pytest.mark.parametrize(
    "text",
    [
        "Date\n",
        "Day,NC6\n",
        "Date,NC6,NC6\n",
        "Date,NC6\n2/24/2020,abc\n",
        "Date,NC6\n2/24/2020,1,2\n",
        "Date,NC6\nx,1\n",
    ],
)
def test_a_wrong_azure_table_is_refused(text):
    """Header, width, prices and days are checked."""
    with pytest.raises(PriceLogError):
        list(parse_azure_prices(text, region="r", source="f"))


@pytest.mark.parametrize("sizes", ["NC6,K80,12345678", "NC6,K80", "NC6,K80,0", f"{'N' * 200_000},K80,1"])
def test_wrong_azure_sizes_are_refused_with_their_line(tmp_path, sizes):
    (tmp_path / "sizes.csv").write_text(f"Instance,GPU type,# GPUs\n{sizes}\n")
    with pytest.raises(PriceLogError, match=r"sizes\.csv"):
        read_market(tmp_path)


def test_google_clouds_prices_are_constant():
    """Per zone, type and number."""
    line = "Zone: us-west1-b, GPU type: nvidia-tesla-v100, Number of GPUs: 8, Price per hour: $6.808"
    (row,) = parse_gcp_prices(line + "\nother\n", start=5.0, source="f")
    assert (row.region, row.zone, row.instance) == ("us-west1", "us-west1-b", "nvidia-tesla-v100 x 8")
    assert (row.point.time, row.point.usd) == (5.0, 6.808)
    with pytest.raises(PriceLogError, match="line 1"):
        list(parse_gcp_prices("Zone: nowhere", start=0.0, source="f"))


LOG = """[2020-03-15T10:00:00.000Z] Created instance i-1 with 8 GPU(s) of type v100 in zone us-east-1b
[2020-03-15T11:00:00.000Z] Instance i-1 running in zone us-east-1b
[2020-03-15T12:00:00.000Z] Instance i-1 not running in zone us-east-1b
[2020-03-15T12:01:00.000Z] Successfully deleted instance i-1
[2020-03-15T12:02:00.000Z] Instance with 8 GPU(s) of type v100 creation failed
[2020-03-15T13:00:00.000Z] Created instance i-2 with 8 GPU(s) of type v100 in zone us-east-1b
[2020-03-15T14:00:00.000Z] Instance i-2 running in zone us-east-1b
"""


def test_a_machine_is_lost_between_two_looks():
    """In the middle; the last one is not lost when the log ends."""
    (found,) = parse_availability(LOG, source="f").items()
    pool, log = found
    assert pool == Pool(cloud="aws", zone="us-east-1b", gpu_type="v100", gpus=8)
    assert [(span.end - span.start, span.preempted) for span in log.spans] == [
        (5400.0, True),
        (3600.0, False),
    ]
    assert log.preemptions == 1


def test_a_log_is_repeated_where_a_replay_is_longer():
    """End to end; its last machine becomes the first of the next turn where the gap is short."""
    (log,) = parse_availability(LOG, source="f").values()
    spans = log.replayed(log.start, log.start + 3 * (log.end - log.start))
    assert sum(span.preempted for span in spans) == 3
    assert all(one.end <= two.start for one, two in itertools.pairwise(spans))
    assert log.replayed(log.start, log.end) == list(log.spans)


def test_two_logs_of_one_pool_are_one(tmp_path):
    """It is up while a machine of either runs, also where both were watched at the same time."""
    (tmp_path / "a.json").write_text(aws(ROW))
    (tmp_path / "a.log").write_text(LOG)
    (tmp_path / "b.log").write_text(
        "[2020-03-15T11:00:00Z] Created instance i-3 with 8 GPU(s) of type v100 in zone us-east-1b\n"
        "[2020-03-15T12:30:00Z] Instance i-3 running in zone us-east-1b\n"
    )
    (log,) = read_market(tmp_path).availability.values()
    assert [(span.end - span.start) / 3600 for span in log.spans] == [2.5, 1.0]
    assert log.preemptions == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no line"),
        ("hello", "is not"),
        ("[2020-03-15T10:00:00Z] Instance i rules the world", "no event"),
        ("[2020-03-15T10:00:00Z] Created instance i with 0 GPU(s) of type v100 in zone us-east-1b", "0 GPUs"),
        (LOG.splitlines()[1] + "\n" + LOG.splitlines()[0], "before the line above"),
        ("x" * 100_000, "is not"),
    ],
)
def test_a_wrong_availability_log_is_refused(text, reason):
    with pytest.raises(PriceLogError, match=reason):
        parse_availability(text, source="f")


def test_the_excerpt_is_a_market():
    """All three clouds, with prices, on-demand prices and preemptions."""
    market = excerpt()
    assert {offer.cloud for offer in market.spot} == {"aws", "azure", "gcp"}
    assert {offer.gpu_type for offer in market.spot} == {"k80", "p100", "v100"}
    assert not market.ignored
    known = {(offer.cloud, offer.instance): price for offer, price in market.on_demand.items()}
    assert known["aws", "p3.2xlarge"] == 3.06
    for offer, prices in market.spot.items():
        dearest = max(prices.usd[prices.usd == prices.usd], default=0.0)
        assert dearest <= 2 * known[offer.cloud, offer.instance]
    assert sum(log.preemptions for log in market.availability.values()) > 300


def test_a_folder_may_bring_its_own_instances(tmp_path):
    """An instance that the catalogue does not know is named; instances.csv adds it."""
    (tmp_path / "prices.json").write_text(aws(ROW, {**ROW, "InstanceType": "x9.mega", "SpotPrice": "5"}))
    assert "aws x9.mega: 1 prices" in read_market(tmp_path).ignored[0]
    (tmp_path / "instances.csv").write_text(
        "cloud,instance,gpu_type,gpus,on_demand_usd_per_hour\naws,x9.mega,X900,4,12\n"
    )
    market = read_market(tmp_path)
    assert not market.ignored
    assert ("x900", 4) in {(offer.gpu_type, offer.gpus) for offer in market.spot}


def test_a_folder_without_prices_is_refused(tmp_path):
    with pytest.raises(PriceLogError, match="no folder"):
        read_market(tmp_path / "nothing")
    with pytest.raises(PriceLogError, match="no spot price"):
        read_market(tmp_path)
    (tmp_path / "a.json").write_text(aws({**ROW, "InstanceType": "x9.mega"}))
    with pytest.raises(PriceLogError, match=r"x9\.mega.*instances\.csv"):
        read_market(tmp_path)
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PriceLogError, match="cannot be read"):
        read_market(tmp_path)


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
    with pytest.raises(PriceLogError):
        list(parse_aws_prices(text, source="f"))


def test_the_last_good_price_stays():
    """Before the first one there is none."""
    prices, _ = series([Point(time=100.0, usd=1.0), Point(time=200.0, usd=2.0)])
    np.testing.assert_equal(prices.at(np.array([99.0, 100.0, 250.0, 5000.0])), [np.nan, 1.0, 2.0, 2.0])


def test_an_outlier_does_not_replace_the_price():
    """A tenfold slip of the keyboard is counted and left out."""
    prices, outliers = series(
        [Point(time=0.0, usd=1.0), Point(time=10.0, usd=100.0), Point(time=20.0, usd=0.001)],
        on_demand_usd=3.0,
    )
    assert prices.at(np.array([30.0])) == 1.0
    assert [point.time for point in outliers] == [10.0, 20.0]


def test_not_offered_is_a_price_of_none():
    """Azure leaves the cell empty; from then on there is nothing to rent."""
    prices, _ = series([Point(time=0.0, usd=1.0), Point(time=10.0, usd=None)])
    np.testing.assert_equal(prices.at(np.array([5.0, 10.0])), [1.0, np.nan])
    with pytest.raises(ValueError, match="no price"):
        prices.usd_between(5.0, 15.0)


@given(
    st.dictionaries(st.integers(0, 10**6), st.floats(0.01, 100), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_a_bill_can_be_cut_anywhere(points, cut):
    """What two parts of a stay cost is what the whole costs."""
    prices, _ = series([Point(time=float(t), usd=usd) for t, usd in points.items()])
    start, end = float(min(points)), float(min(points)) + 2e6
    middle = start + cut * (end - start)
    whole = prices.usd_between(start, end)
    parts = (prices.usd_between(start, middle) if middle > start else 0.0) + prices.usd_between(middle, end)
    assert parts == pytest.approx(whole)
    assert min(points.values()) <= whole / (end - start) * 3600 * (1 + 1e-9)


@given(st.permutations([Point(time=float(t), usd=1.0 + t) for t in range(6)]))
def test_order_and_repetition_do_not_matter(points):
    """AWS answers newest first, and scrapes overlap."""
    prices, _ = series([*points, *points[:3]])
    assert np.array_equal(prices.usd, 1.0 + np.arange(6))


def test_a_history_whose_times_do_not_increase_is_refused():
    """A series is a function of time."""
    with pytest.raises(ValueError, match="increasing"):
        PriceSeries(np.array([1.0, 1.0]), np.array([1.0, 1.0]))
