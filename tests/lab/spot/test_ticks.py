"""A job on a grid of ticks, and the commands that hold the rule of deadlines against published results."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from ballast_lab import cant_be_late, skynomad
from ballast_lab.spot.ticks import TickJob, Zone, run_ticks
from click.testing import CliRunner

HOUR = 3600.0


def zone(samples: str, usd: float = 1.0, region: str = "here") -> Zone:
    there = np.array([sample == "#" for sample in samples])
    return Zone(region=region, there=there, spot_usd=np.full(len(there), usd), on_demand_usd=5.0)


def job(hours: float, deadline: float, **more: float) -> TickJob:
    return TickJob(seconds=hours * HOUR, deadline_seconds=deadline * HOUR, startup_seconds=0.2 * HOUR, **more)


def test_spot_machines_that_stay_are_paid_with_one_start_up():
    """Two hours of work and 0.2 h of start-up in ticks of a sixth."""
    found = run_ticks([zone("#" * 24)], job(2.0, 4.0))
    assert (found.in_time, found.launches, found.on_demand_hours) == (True, 1, 0)
    assert found.usd == pytest.approx(14 / 6)


def test_no_deadline_is_missed_where_spot_machines_never_come():
    """All on demand, and not before it must but for the reserve."""
    found = run_ticks([zone("." * 60)], job(8.0, 10.0))
    assert found.in_time
    assert found.usd == pytest.approx(5.0 * found.on_demand_hours)


def test_on_demand_is_left_only_for_spot_machines_that_have_stayed_a_while():
    """Spells of one tick are not worth two start-ups; a long one is."""
    flapping = run_ticks([zone("#." * 5 + "..#" * 30)], job(13.0, 16.0, look_seconds=0.0))
    steady = run_ticks([zone("#." * 5 + "..." * 12 + "#" * 54)], job(13.0, 16.0, look_seconds=0.0))
    assert flapping.in_time
    assert steady.in_time
    assert steady.on_demand_hours < 8.5
    assert flapping.launches <= 7


def test_a_large_checkpoint_stays_in_its_region():
    """The dearer zone beside it is worth more than carrying it away."""
    zones = [
        zone("#" * 12 + "." * 48, 1.0),
        zone("#" * 60, 1.3),
        zone("." * 12 + "#" * 48, 1.0, "far"),
    ]
    egress = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    near = run_ticks(zones, job(6.0, 7.0, checkpoint_gb=50.0), egress)
    light = run_ticks(zones, job(6.0, 7.0, checkpoint_gb=0.0), egress)
    assert near.egress_usd == 0
    assert near.in_time
    assert light.usd < near.usd


def parts(*spells: tuple[int, float]) -> Zone:
    """A zone at a dollar an hour: (ticks, part of the gang that is there)."""
    there = np.concatenate([np.full(ticks, part) for ticks, part in spells])
    return dataclasses.replace(zone("#" * len(there)), there=there)


def test_an_elastic_gang_runs_on_what_is_there_and_pays_for_that():
    """Half of it for two hours of work: four and a start-up at half the price; a fixed one is on demand."""
    half = [parts((60, 0.5))]
    found = run_ticks(half, job(2.0, 9.0, least=0.5))
    assert (found.in_time, found.launches, found.on_demand_hours) == (True, 1, 0)
    assert found.usd == pytest.approx(26 / 6 / 2)
    assert run_ticks(half, job(2.0, 9.0, least=0.6)).on_demand_hours > 2
    assert run_ticks(half, job(2.0, 9.0, least=0.5, exponent=0.5)).usd == pytest.approx(19 / 6 / 2)


def test_an_elastic_gang_shrinks_at_once_and_grows_as_new_ranks_have_started():
    """Whole, half, whole: one launch; new ranks are paid as they start."""
    found = run_ticks([parts((6, 1.0), (6, 0.5), (48, 1.0))], job(2.0, 9.0, least=0.5))
    assert (found.launches, found.preemptions, found.in_time) == (1, 0, True)
    # 0.8 h, 0.5 h, and then 0.1 h by half of it until the other half has started, and 0.6 h by all.
    assert found.usd == pytest.approx(6 / 6 + 6 / 6 / 2 + 5 / 6)


@pytest.mark.parametrize("deadline", [3.0, 5.0, 8.0])
def test_no_job_costs_less_than_its_bound(deadline):
    """Of whole gangs and elastic ones; where all are there at one price, that of their hours."""
    zones = [parts((12, 0.5), (12, 0.0), (40, 1.0)), parts((5, 1.0), (59, 0.25))]
    for least in (1.0, 0.5, 0.25):
        one = job(2.0, deadline, least=least, exponent=0.9)
        assert 0 < skynomad.least_usd(zones, one) <= run_ticks(zones, one).usd
    assert skynomad.least_usd([parts((60, 1.0))], job(2.0, 9.0)) == pytest.approx(2.0)


def write_traces(folder, **data):
    """Zones ``us-a1-a`` at 10 USD and ``us-b1-a`` at 12, as the artifact has them."""
    for name, samples in data.items():
        at = folder / f"us-{name}-a_h100_16"
        at.mkdir(parents=True)
        price = {"price": 10.0 if name == "a1" else 12.0, "on_demand_price": 50.0}
        about = {"gap_seconds": 600, "price_info": price}
        (at / "full.json").write_text(json.dumps({"metadata": about, "data": samples}))


@pytest.mark.slow
def test_elastic_gangs_are_compared_over_probed_machines_and_over_drawn_ones(tmp_path):
    """Eight of sixteen in each probe: what may run on eight is cheaper, what may not is on demand."""
    write_traces(tmp_path / "traces", a1=[0] * 620)
    drawn = CliRunner().invoke(skynomad.elastic, ["--data", str(tmp_path)])
    assert drawn.exit_code == 0, drawn.output
    assert "machines: drawn where there was one" in drawn.output
    (tmp_path / "h100_16_runs").mkdir()
    for tick in range(620):
        result = {"zone_results": {"us-a1-a": {"instances_created": 8}}}
        (tmp_path / "h100_16_runs" / f"{tick:04}.json").write_text(json.dumps(result))
    probed = CliRunner().invoke(skynomad.elastic, ["--data", str(tmp_path)])
    assert probed.exit_code == 0, probed.output
    assert "machines: as probed" in probed.output
    row = next(line for line in probed.output.splitlines() if " 86.4" in line)
    assert float(row.split()[5].rstrip(",")) < 0.5
    assert row.split()[-1] == "0/0/0/0"


def test_skynomads_cells_are_read_and_compared(tmp_path):
    """A cell of two zones, of which one goes: figures over the published optimum, and the mean."""
    write_traces(tmp_path / "traces", a1=[0] * 20 + [1] * 40, b1=[0] * 60)
    columns = {
        "scenario_name": "Two",
        "regions_in_scenario": "['us-a1-a_h100_16', 'us-b1-a_h100_16']",
        "task_type": "multi_region",
        "task_duration": 6.0,
        "checkpoint_size": 50.0,
        "restart_overhead": 0.2,
        "deadline_hours": 8.0,
        "env_start_hours": 0.5,
    }
    with (tmp_path / "result_x.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, [*columns, "strategy", "cost"])
        rows.writeheader()
        for strategy, cost in (("multi_region_oracle_dp", 70.0), ("unified_cost_model_risk", 75.0)):
            rows.writerow({**columns, "strategy": strategy, "cost": cost})
    done = CliRunner().invoke(skynomad.main, ["--data", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "mean of 1 cells" in done.output
    (cell,) = skynomad.read_cells(tmp_path)
    found = skynomad.run_window(cell, skynomad.Traces(tmp_path), 0.5)
    # 17 ticks at 10 and 22 at 12 with two start-ups, and a checkpoint that is carried for a dollar.
    assert found.usd == pytest.approx(17 / 6 * 10 + 22 / 6 * 12 + 1.0)
    missing = CliRunner().invoke(skynomad.main, ["--data", str(tmp_path / "traces")])
    assert "has no result_" in missing.output
    text = (tmp_path / "result_x.csv").read_text()
    (tmp_path / "result_x.csv").write_text(text.replace("['us-a1-a_h100_16', 'us-b1-a_h100_16']", "[("))
    assert (
        "cannot be read: SyntaxError" in CliRunner().invoke(skynomad.main, ["--data", str(tmp_path)]).output
    )
    (tmp_path / "result_x.csv").write_text(text.replace("us-a1-a_h100_16", "us-east-1a_v100_1"))
    (tmp_path / "v100_us-east-1a.csv").write_text(
        "date,availability\n2020-01-01T00:00:00,1\n2020-01-01T00:10:00,1\n"
    )
    no_prices = CliRunner().invoke(skynomad.main, ["--data", str(tmp_path)])
    assert "no trace of the prices of us-east-1a_v100_1" in no_prices.output


@pytest.mark.slow
def test_windows_of_cant_be_late_are_scored(tmp_path):
    """Spot all the time saves all but the start-up; none saves nothing."""
    windows = {"z": {"gap_seconds": 600, "windows": ["1" * 440, "0" * 440]}}
    (tmp_path / "windows.json").write_text(json.dumps(windows))
    done = CliRunner().invoke(cant_be_late.main, ["--data", str(tmp_path), "--windows", "0:1"])
    assert done.exit_code == 0, done.output
    row = next(line.split() for line in done.output.splitlines() if line.startswith("z "))
    assert [float(text) for text in row[4:7]] == pytest.approx([1.0, 1.0, 1.0], abs=0.01)
    assert row[7] == "0"
    none = CliRunner().invoke(cant_be_late.main, ["--data", str(tmp_path), "--windows", "9:"])
    assert "--windows: 9: has none of z" in none.output
    # 50 hours without a spot machine, for each of the three.
    for row in cant_be_late.settings({"z": (600.0, ["0" * 300])}).values():
        assert all(kind == pytest.approx((0.0, 0), abs=0.03) for kind in row.values())
    usd, in_time = cant_be_late.by_rule(np.zeros(440, dtype=bool), 52.0, 0.2, 600.0)
    assert in_time
    assert usd == pytest.approx(0.0, abs=0.02)
