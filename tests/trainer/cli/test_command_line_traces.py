"""``trace`` draws every schedule; ``simulate --loads`` replays a load that was recorded."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from ballast_policies.planning.schedules import SCHEDULES, trained_schedules


@pytest.mark.parametrize("schedule", trained_schedules())
def test_every_schedule_can_be_traced(call, tmp_path, schedule):
    """As a chrome trace with every action on its rank, and as text with a line a rank."""
    out = tmp_path / "trace.json"
    result = call("trace", "--out", str(out), schedule=schedule, training={"clipNorm": None})
    assert result.exit_code == 0, result.output
    actions = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    forwards = [event for event in actions if event["cat"] == "forward"]
    stages = len({event["args"]["stage"] for event in actions})
    assert {event["tid"] for event in actions} == {0, 1, 2, 3}
    assert len(forwards) == stages * 8 * (2 if SCHEDULES[schedule].asynchronous else 1)
    shown = call("trace", "--even", schedule=schedule)
    assert [line.split()[:2] for line in shown.stdout.splitlines()] == [
        ["rank", str(rank)] for rank in range(4)
    ]


def test_a_trace_is_a_picture_or_what_torch_reads(call, tmp_path):
    """.svg is XML that says it is simulated, .csv has a row of actions a rank."""
    assert call("trace", "--out", str(tmp_path / "trace.svg")).exit_code == 0
    assert "simulated" in ElementTree.parse(tmp_path / "trace.svg").getroot()[0].text
    assert call("trace", "--out", str(tmp_path / "trace.csv")).exit_code == 0
    rows = (tmp_path / "trace.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("0F0,0F1,0F2,0F3,0B0")


def test_a_recorded_load_curve_is_replayed(call, tmp_path):
    """The balancer follows it again: each turn of the load is a move, and the step nears the best at each
    look."""
    front, back = [0.4] * 6 + [0.1] * 6, [0.1] * 6 + [0.4] * 6
    looks = [turn for turn in (front, back, front, back) for _ in range(5)]
    lines = [{"step": 10, "loss": 1.0}]
    lines += [{"event": "loads", "step": 10 * n, "seconds": row} for n, row in enumerate(looks, start=1)]
    path = tmp_path / "run.jsonl"
    path.write_text("starting\n" + "\n".join(json.dumps(line) for line in lines))
    result = call("simulate", "--output", "json", "--ranks", "3", "--loads", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["replay"]
    assert (found["looks"], found["moves"]) == (20, [60, 110, 160])
    assert found["bestSeconds"] < found["followedSeconds"] < found["staticSeconds"]
    stays = json.loads(
        call(
            "simulate", "--output", "json", "--ranks", "3", "--loads", str(path), rebalance={"minGain": 0.9}
        ).stdout
    )["replay"]
    assert stays["moves"] == []
    assert "3 moves over 3 ranks" in call("simulate", "--ranks", "3", "--loads", str(path)).stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no event 'loads'"),
        ('{"event": "loads", "step": 1, "seconds": [1, -1]}', "not a load"),
        (
            '{"event": "loads", "step": 1, "seconds": "12"}\n{"event": "loads", "step": 2, "seconds": [1]}',
            "numbers",
        ),
        ('{"event": "loads", "step": 1}', "cannot be read"),
        ('{"event": "loads", "step": 1, "seconds": [NaN]}', "cannot be read"),
    ],
)
def test_what_is_no_load_curve_is_refused(call, tmp_path, text, why):
    """With what to give instead."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    result = call("simulate", "--loads", str(path))
    assert result.exit_code == 2
    assert why in result.output and "To fix: give what" in result.output
