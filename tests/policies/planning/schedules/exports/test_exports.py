"""What a schedule looks like outside: CSV, text, chrome trace, picture."""

import itertools
import json
import xml.etree.ElementTree as ET

import pytest
from ballast_policies.planning.schedules.builders.asynchronous import pipedream
from ballast_policies.planning.schedules.builders.synchronous import (
    one_forward_one_backward,
)
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.exports import (
    chrome_trace,
    schedule_csv,
    schedule_svg,
    timeline,
)
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import Action, ScheduleError
from ballast_policies.planning.schedules.simulate import simulate


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if not kind.asynchronous])
def test_the_csv_has_every_action_of_each_rank_in_order(name):
    schedule = build_schedule(name, ranks=3, microbatches=6, chunks=2)
    rows = [line.split(",") for line in schedule_csv(schedule).splitlines()]
    assert tuple(tuple(map(Action.parse, row)) for row in rows) == schedule.actions


def test_updates_have_no_csv_form():
    """torch's runtime could not run them."""
    with pytest.raises(ScheduleError, match="updates between microbatches"):
        schedule_csv(pipedream([1, 1], 4))


def test_the_timeline_of_1f1b_shows_its_bubble():
    """Forward digits, backward letters, dots while a rank waits."""
    trace = simulate(one_forward_one_backward(2, 2), even_costs(2))
    assert timeline(trace, columns=9) == "rank  0 01..aa.bb\nrank  1 .0aa1bb.."
    tiniest = simulate(one_forward_one_backward(1, 1), even_costs(1, forward=5e-324, backward=0.0))
    assert timeline(tiniest, columns=3) == "rank  0 000"


def test_the_chrome_trace_has_every_action_once_in_microseconds():
    """Events of one rank do not overlap and end at the makespan."""
    trace = simulate(build_schedule("ZeroBubbleV", ranks=4, microbatches=8), even_costs(8))
    events = [event for event in json.loads(chrome_trace(trace))["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(row) for row in trace.schedule.actions)
    for rank in range(4):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(trace.makespan * 1e6)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_picture_is_svg_with_a_box_for_every_action(name):
    """It parses, and its boxes stay inside."""
    schedule = build_schedule(name, ranks=4, microbatches=8, chunks=2)
    root = ET.fromstring(schedule_svg(simulate(schedule, even_costs(schedule.stages))))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in root.iter(f"{space}rect") if box.get("stroke")]
    assert len(boxes) == sum(len(row) for row in schedule.actions)
    assert all(float(box.get("x")) + float(box.get("width")) <= 1000 for box in boxes)
