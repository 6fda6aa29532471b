"""Figures in a status that somebody else has written: no sum of them keeps the operator from reporting."""

import json
import math

from ballast_operator.api.base import storable
from ballast_operator.kube.kinds import POLICY

from tests.operator.loops.simulated.simulation import Simulation

LARGEST = 1.7e308
SINCE = "2025-01-01T00:00:00Z"


def test_what_is_stored_is_within_the_numbers_of_the_api_server():
    """Whatever the sums have come to; all else is as it was."""
    content = {
        "a": [math.inf, -math.inf, math.nan, 2**70, -(2**70)],
        "b": {"c": 1.5, "d": True, "e": "Infinity"},
    }
    found = storable(content)
    assert found["b"] == content["b"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["a"][0] > LARGEST > found["a"][2] == 0.0
    assert found["a"][3:] == [2**63 - 1, 1 - 2**63]


async def test_a_policys_sums_beyond_all_numbers_are_reported_as_the_largest():
    """A stranger has written them; the report goes on, and so do the jobs."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    simulation.add_job("one", totalSteps=100_000, trainer={"total": 100_000})
    await simulation.until(lambda: simulation.state("one") == "Running")
    figures = {"cost": LARGEST, "monthCost": LARGEST, "costPerHour": LARGEST}
    bill = {
        "cost": LARGEST,
        "heldCost": LARGEST,
        "gpuSeconds": LARGEST,
        "gpus": 2**62,
        "pricePerGpuHour": 1e6,
    }
    written = {
        "teams": [{"team": "x", "since": SINCE, **figures}],
        "bill": [{"pool": "fast", "since": SINCE, **bill}],
        "billAt": SINCE,
    }
    simulation.world.patch(POLICY, "", "default", {"status": written})
    before = simulation.world.get(POLICY, "", "default")["status"]["lastRound"]["planId"]
    for _ in range(3):
        await simulation.tick(seconds=3600.0)
    status = simulation.world.get(POLICY, "", "default")["status"]
    assert json.dumps(status, allow_nan=False)
    assert status["lastRound"]["planId"] != before
    (team,) = [entry for entry in status["teams"] if entry["team"] == "x"]
    assert team["cost"] >= LARGEST
    assert simulation.state("one") == "Running"
