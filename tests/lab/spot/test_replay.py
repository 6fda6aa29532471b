"""Jobs in clouds whose prices change and whose machines are taken away."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from ballast_lab.prices.availability import AvailabilityLog, Span
from ballast_lab.prices.history import PriceSeries
from ballast_lab.prices.market import Market
from ballast_lab.prices.offers import Offer
from ballast_lab.spot.engine import replay
from ballast_lab.spot.settings import SpotJob, SpotSettings
from ballast_policies.simulator.settings import SettingsError
from hypothesis import given
from hypothesis import strategies as st

HOUR = 3600.0


def offer(zone="us-east-1a", gpu_type="v100", gpus=1, spot=True, cloud="aws"):
    return Offer(
        cloud=cloud,
        region="us-east-1",
        zone=zone,
        instance=f"{gpus}{gpu_type}",
        gpu_type=gpu_type,
        gpus=gpus,
        spot=spot,
    )


def prices(*points):
    times, usd = zip(*points, strict=True)
    return PriceSeries(np.array(times, dtype=float), np.array(usd, dtype=float))


def log(*ups, end):
    return AvailabilityLog(
        start=0.0, end=end, spans=tuple(Span(start=a, end=b, preempted=b < end) for a, b in ups)
    )


def market(spot, on_demand=None, logs=None):
    on_demand = {offer(spot=False): 3.0} if on_demand is None else on_demand
    return Market(
        spot=spot, on_demand=on_demand, availability={o.pool: each for o, each in (logs or {}).items()}
    )


def job(hours=10.0, deadline=None, name="a", arrival=0.0, gpus=1, **speeds):
    speeds = speeds or {"v100": 1.0}
    return SpotJob(
        name=name,
        arrival=arrival,
        steps=hours * HOUR,
        gpus=gpus,
        speeds=speeds,
        deadline_seconds=None if deadline is None else deadline * HOUR,
    )


def settings(policy="min-cost-slo", **more):
    return SpotSettings(policy=policy, start=1.0, **more)


def run(there, *jobs, **more):
    return replay(there, jobs, settings(**more))


def test_a_quiet_market_costs_its_price():
    """Start-up and checkpoints are paid like the rest."""
    result = run(market({offer(): prices((1, 1.0))}), job())
    (outcome,) = result.outcomes
    assert outcome.usd == pytest.approx((outcome.finish - 1.0) / HOUR)
    assert outcome.startup_usd == pytest.approx(180 / HOUR)
    assert outcome.usd == pytest.approx(10.05, rel=0.01)
    assert outcome.oracle_usd <= outcome.usd < outcome.oracle_usd * 1.01
    assert outcome.on_demand.usd == pytest.approx(30.15, rel=0.01)


def test_a_notice_saves_every_step():
    """120 s are enough to save; the start-up is what a preemption costs, and checkpoints are seldom."""
    there = market(
        {offer(): prices((1, 1.0))},
        logs={offer(): log((0, 4 * HOUR), (4.1 * HOUR, 100 * HOUR), end=100 * HOUR)},
    )
    (outcome,) = run(there, job()).outcomes
    assert (outcome.preemptions, outcome.lost_steps) == (1, 0.0)
    assert 10.1 * HOUR < outcome.finish < 10.29 * HOUR


def test_without_a_notice_the_steps_since_the_last_checkpoint_are_done_twice():
    """And are counted; checkpoints by Daly's formula take less than 1 % besides."""
    there = market(
        {offer(): prices((1, 1.0))},
        logs={offer(): log((0, 4.4 * HOUR), (4.5 * HOUR, 100 * HOUR), end=100 * HOUR)},
    )
    (outcome,) = run(there, job(), notice_seconds=0.0).outcomes
    assert outcome.preemptions == 1
    assert 0 < outcome.lost_steps < 0.5 * HOUR
    (saved,) = run(there, job()).outcomes
    assert outcome.lost_steps < outcome.finish - saved.finish < outcome.lost_steps + 0.01 * 10 * HOUR


@pytest.mark.parametrize(
    ("points", "end"), [([(HOUR, 1.0)], 9 * HOUR), ([(0, 1.0), (HOUR, 1.1)], 0.5 * HOUR)]
)
def test_a_replay_starts_where_prices_or_logs_of_machines_reach(points, end):
    """A price that never changes is one moment, or none that is known."""
    there = market({offer(): prices(*points)}, logs={offer(): log((0, end), end=end)})
    last = max(HOUR, end)
    for start in (HOUR, last):
        assert replay(there, [job(1)], SpotSettings(policy="min-cost", start=start)).outcomes
    for start in (HOUR - 1, last + 1):
        with pytest.raises(SettingsError, match="is not within the prices, which are from 1970-01-01T01:00"):
            replay(there, [job(1)], SpotSettings(policy="min-cost", start=start))


def test_a_cheaper_zone_is_moved_to():
    """When the price of the other one rises for long enough to pay for the move."""
    there = market(
        {
            offer("us-east-1a"): prices((1, 1.0), (3 * HOUR, 2.0)),
            offer("us-east-1b"): prices((1, 1.2)),
        }
    )
    (outcome,) = run(there, job(24)).outcomes
    assert outcome.moves == 1
    assert [stay[0].zone for stay in outcome.stays] == ["us-east-1a", "us-east-1b"]


def test_a_deadline_is_kept_though_spot_machines_never_last():
    """Taken away every half hour; on demand at the last safe moment."""
    ups = [(k * 2000.0, k * 2000.0 + 1500.0) for k in range(1000)]
    there = market({offer(): prices((1, 0.5))}, logs={offer(): log(*ups, end=2e6)})
    (outcome,) = run(there, job(10, deadline=12)).outcomes
    assert outcome.in_time
    assert outcome.usd < outcome.on_demand.usd
    assert not outcome.stays[-1][0].spot


def test_min_cost_reads_no_deadline():
    """The same job, late and cheap."""
    slow, fast = offer(gpu_type="k80"), offer()
    there = market({slow: prices((1, 0.1)), fast: prices((1, 2.0))})
    jobs = job(10, 12, v100=1.0, k80=0.25)
    assert not run(there, jobs, policy="min-cost").outcomes[0].in_time
    kept = run(there, jobs).outcomes[0]
    assert kept.in_time
    assert kept.usd > run(there, jobs, policy="min-cost").outcomes[0].usd


def test_googles_machines_live_a_day():
    """Whatever the log says."""
    there = market({offer("us-west1-b", cloud="gcp"): prices((1, 1.0))})
    (outcome,) = run(there, job(60)).outcomes
    assert outcome.preemptions == 2


def test_a_withdrawn_offer_is_a_preemption():
    """An empty cell in Azure's table."""
    azure = offer("us_east", cloud="azure")
    there = market({azure: prices((1, 1.0), (5 * HOUR, math.nan))})
    (outcome,) = run(there, job(10)).outcomes
    assert outcome.preemptions == 1
    assert outcome.finish > 10 * HOUR


def test_a_quota_makes_jobs_wait_for_each_other():
    """One GPU of a type at a time."""
    there = market({offer(): prices((1, 1.0))})
    free = run(there, job(name="a"), job(name="b"))
    one = run(there, job(name="a"), job(name="b"), quota={"v100": 1})
    assert free.outcomes[1].finish < 11 * HOUR
    assert one.outcomes[1].finish > 20 * HOUR


def test_a_gang_pays_for_all_of_its_machines():
    """Four machines of one GPU, or one of four, whichever is cheaper."""
    small, large = offer(), offer(gpus=4)
    there = market({small: prices((1, 1.0)), large: prices((1, 3.0))})
    (outcome,) = run(there, job(10, gpus=4, v100=4.0)).outcomes
    assert outcome.stays[0][0].gpus == 4
    assert outcome.usd == pytest.approx(3 * 2.55, rel=0.02)


def test_a_job_that_nothing_can_run_is_refused():
    with pytest.raises(SettingsError, match="h100, and the prices are of v100"):
        run(market({offer(): prices((1, 1.0))}), job(h100=1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "fifo"},
        {"review_seconds": 1.0},
        {"launch_seconds": -1.0},
        {"hysteresis": math.nan},
        {"quota": {"v100": -1}},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(SettingsError):
        SpotSettings(**{"policy": "min-cost", **wrong})


LEVELS = st.lists(st.floats(0.2, 2.9), min_size=1, max_size=4)


@pytest.mark.slow
@given(
    st.lists(LEVELS, min_size=1, max_size=3),
    st.floats(1, 40),
    st.one_of(st.none(), st.floats(1.0, 4.0)),
    st.integers(0, 3),
    st.floats(0, HOUR),
)
def test_every_bill_is_between_its_bounds(zones, hours, slack, seed, arrival):
    """Never below what is possible, deadlines kept when on demand would keep them, the parts sum up."""
    spot = {
        offer(f"us-east-1{chr(97 + k)}"): prices(*((1 + 7 * HOUR * t, usd) for t, usd in enumerate(levels)))
        for k, levels in enumerate(zones)
    }
    ups = [(k * 9000.0, k * 9000.0 + 8000.0) for k in range(500)]
    there = market(spot, logs={offer(): log(*ups, end=4.5e6)})
    work = job(hours, None if slack is None else hours * slack + 0.5, arrival=arrival)
    for policy in ("min-cost-slo", "on-demand"):
        (outcome,) = run(there, work, policy=policy, seed=seed).outcomes
        stays = outcome.stays
        assert outcome.usd == pytest.approx(math.fsum(stay[4] for stay in stays) + outcome.egress_usd)
        assert all(one[3] <= two[2] for one, two in itertools.pairwise(stays))
        paid = math.fsum(stay[3] - stay[2] for stay in stays)
        assert outcome.gpu_seconds == pytest.approx(paid)
        assert paid >= work.steps
        assert outcome.in_time is not False or not outcome.on_demand.feasible
        assert outcome.oracle_usd <= outcome.usd * (1 + 1e-9)


def test_the_bound_knows_a_price_that_falls_between_two_moments_of_its_grid():
    """The job arrives between two reviews, and pays the least price from the next one on."""
    there = market({offer(): prices((1, 2.9), (601, 0.1))})
    (outcome,) = run(there, job(0.4, arrival=300.0), policy="min-cost").outcomes
    assert outcome.usd == pytest.approx((300 * 2.9 + (outcome.finish - 601) * 0.1) / HOUR)
    assert outcome.oracle_usd < outcome.usd


def test_machines_that_go_while_the_job_saves_are_lost_at_once():
    """A move to a pool that ends within the save: nothing is paid there, and the job looks on."""
    target = offer("us-east-1b")
    there = market(
        {offer(): prices((1, 2.0)), target: prices((1, 2.5), (2 * HOUR, 0.5))},
        logs={
            offer(): log((0, 100 * HOUR), end=100 * HOUR),
            target: log((0, 2 * HOUR + 100), end=100 * HOUR),
        },
    )
    (outcome,) = run(there, job(10), checkpoint_seconds=300.0).outcomes
    lost = [stay for stay in outcome.stays if stay[5] == "preempted"]
    assert [(stay[0].zone, stay[3] - stay[2], stay[4]) for stay in lost] == [("us-east-1b", 0.0, 0.0)]
    assert outcome.finish > 10 * HOUR


@pytest.mark.slow
def test_the_same_seed_is_the_same_replay():
    """Another seed takes other machines away where no log is."""
    spot = {offer("us-east-1a"): prices((1, 1.0)), offer("us-east-1b"): prices((1, 1.0))}
    ups = [(k * 9000.0, k * 9000.0 + 8000.0) for k in range(100)]
    there = market(spot, logs={offer("us-east-1c"): log(*ups, end=9e5)})

    def ends(seed):
        return [stay[3] for stay in run(there, job(50), seed=seed).outcomes[0].stays]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


def test_a_rate_is_learned_from_what_was_seen():
    ups = [(k * 9000.0, k * 9000.0 + 8000.0) for k in range(100)]
    result = run(market({offer(): prices((1, 1.0))}, logs={offer(): log(*ups, end=9e5)}), job(50))
    (rate,) = result.to_json(per_job=False)["preemptions_per_hour"].values()
    assert rate["low"] < rate["mean"] < rate["high"]
    assert rate["seen"] == result.outcomes[0].preemptions > 10


def test_rows_have_every_stay():
    result = run(market({offer(): prices((1, 1.0))}), dataclasses.replace(job(), deadline_seconds=1e6))
    (row,) = result.to_json(per_job=True)["jobs"]
    assert row["deadline_met"] is True
    assert row["stays"][0]["offer"] == "aws/us-east-1a/1v100/spot"
    assert row["stays"][-1]["ended"] == "finished"


def test_on_demand_in_a_market_without_on_demand_machines_is_refused_at_once():
    """With the job and its GPU types, and not after years of waiting."""
    there = market({offer(): prices((1, 1.0))}, on_demand={})
    with pytest.raises(SettingsError, match="no on-demand machine for a, which runs on v100"):
        run(there, job(), policy="on-demand")
