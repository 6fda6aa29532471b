"""``trace`` draws every schedule; ``simulate --loads`` replays a load that was recorded."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from ballast_policies.planning.schedules.registry import SCHEDULES, trained_schedules


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


def replayed(call, path, *arguments, **fields):
    """What ``simulate --loads`` finds."""
    result = call("simulate", "--output", "json", "--loads", str(path), *arguments, **fields)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["replay"]


def test_a_recorded_load_curve_is_replayed(call, tmp_path):
    """The balancer follows it again: each turn of the load is a move, and the step nears the best at each
    look."""
    front, back = [0.4] * 6 + [0.1] * 6, [0.1] * 6 + [0.4] * 6
    looks = [turn for turn in (front, back, front, back) for _ in range(5)]
    lines = [{"step": 10, "loss": 1.0}]
    lines += [{"event": "loads", "step": 10 * n, "seconds": row} for n, row in enumerate(looks, start=1)]
    path = tmp_path / "run.jsonl"
    path.write_text("starting\n" + "\n".join(json.dumps(line) for line in lines))
    found = replayed(call, path, "--ranks", "3")
    assert (found["looks"], found["moves"]) == (20, [60, 110, 160])
    assert found["bestSeconds"] < found["followedSeconds"] < found["staticSeconds"]
    assert replayed(call, path, "--ranks", "3", rebalance={"minGain": 0.9})["moves"] == []
    assert "3 moves over 3 ranks" in call("simulate", "--ranks", "3", "--loads", str(path)).stdout
    assert replayed(call, path, "--ranks", "6", parallelism={"data": 2})["moves"] == [60, 110, 160]

    path.write_text("\n".join(json.dumps(lines[1] | {"seconds": row}) for row in (back, front)))
    assert replayed(call, path, "--ranks", "3")["looks"] == 1  # the same step, before and after a restart


def test_a_replay_decides_as_the_trainer_does(call, tmp_path):
    """By what is expected of the coming steps, and not where the gain is less than noise may feign."""
    even = [0.1] * 5 + [0.04] * 2 + [0.1] * 5
    layers = [0.116] * 5 + [0.04] * 2 + [0.1] * 5
    # Moving layer 5 wins a fifteenth, and the halves' shares of a step swing by a tenth.
    noisy = [
        [value * (1 + 0.1 * (-1) ** (layer // 6 + step)) for layer, value in enumerate(layers)]
        for step in range(4)
    ]
    rows = {
        "seconds alone": {},
        "quiet": {"measured": [layers] * 4},
        "noisy": {"measured": noisy},
        "coming": {"coming": even, "measured": [layers] * 4},
    }
    moves = {}
    for name, fields in rows.items():
        first = {"event": "loads", "step": 10, "seconds": even}
        lines = [first, *({"event": "loads", "step": 10 * n, "seconds": layers, **fields} for n in (2, 3, 4))]
        path = tmp_path / "run.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        moves[name] = replayed(call, path, "--ranks", "2", rebalance={"minGain": 0.01})["moves"]
    assert moves == {"seconds alone": [20], "quiet": [20], "noisy": [], "coming": []}


def test_a_load_curve_cannot_be_balanced_by_parameters(call, tmp_path):
    """Refused in words: it has seconds alone."""
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"event": "loads", "step": 10, "seconds": [0.1] * 12}))
    result = call("simulate", "--loads", str(path), rebalance={"by": "parameters"})
    assert result.exit_code == 2
    assert "rebalance.by: 'parameters': a load curve has seconds alone. To fix: " in result.output


@pytest.mark.processes
def test_what_a_run_prints_by_each_look_is_replayed(gang, small_config, call, tmp_path):
    """With the decision's inputs: what layers are expected to take, and the steps that this follows from."""
    config = small_config(totalSteps=14, rebalance={"enabled": True, "everySteps": 4, "minGain": 0.99})
    running = gang(config, ranks=2).succeeded()
    looks = running.events("loads")
    assert [look["step"] for look in looks] == [4, 8, 12]
    for look in looks:
        assert 2 <= len(look["measured"]) <= 8
        assert len(look["seconds"]) == len(look["coming"]) == len(look["measured"][0]) == 8
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, running.lines("rank-0"))))
    assert replayed(call, path, "--ranks", "2")["looks"] == 3


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
        ('{"event": "loads", "step": 1, "seconds": [1, 1], "coming": [1]}', "different numbers of layers"),
    ],
)
def test_what_is_no_load_curve_is_refused(call, tmp_path, text, why):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    result = call("simulate", "--loads", str(path))
    assert result.exit_code == 2
    assert why in result.output and "To fix: give what" in result.output
