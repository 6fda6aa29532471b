"""The examples: each can be read, says how it is run, and between them they show everything there is."""

import itertools
import json
import re
from pathlib import Path

import pytest
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.schedules.registry import trained_schedules
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.launch import ValidatedJob

from tests.support.examples import first_daily

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples/trainer").rglob("*.yaml"))


@pytest.fixture(params=EXAMPLES, ids=[path.stem for path in EXAMPLES])
def example(request, monkeypatch):
    """The path of an example; modules beside it can be imported in the test."""
    monkeypatch.syspath_prepend(request.param.parent)
    return request.param


def test_an_example_states_its_command_and_suits_its_ranks(example):
    """Among its first lines is the command, with its own path and ranks that its layers suffice for."""
    path = re.escape(str(example.relative_to(ROOT)))
    command = rf"^# (?:.*: )?ballast-train run --config {path} --ranks (\d+)"
    ranks = re.search(command, example.read_text(), re.MULTILINE)
    assert ranks is not None, example.read_text()
    ValidatedJob.from_mapping(read_config(example, ())).check_ranks(int(ranks[1]))


def test_every_schedule_and_every_kind_of_change_has_an_example():
    """What can be named in a configuration can be seen in one."""
    configs = [read_config(path, ()) for path in EXAMPLES]
    schedules = {config["pipeline"]["schedule"] for config in configs}
    kinds = {change["kind"] for config in configs for change in config.get("dynamics", ())}
    assert kinds == set(DYNAMICS)
    # The variant of PipeDream is named in the example of PipeDream.
    assert schedules == {*trained_schedules()} - {"PipeDreamVerticalSync"}


@pytest.mark.processes
@pytest.mark.parametrize("name", first_daily(["zero-bubble-v", "interleaved-zero-bubble"]))
def test_an_example_runs_with_its_four_ranks_and_is_traced(gang, name, tmp_path):
    """The first steps of the schedules that ask most of their ranks; what these did, action by action."""
    config = read_config(ROOT / f"examples/trainer/{name}.yaml", ("totalSteps=4",))
    trace = tmp_path / "trace.json"
    running = gang(config, ranks=4, options=["--trace", str(trace), "--trace-step", "2"]).succeeded()
    assert len(running.losses()) == 4
    actions = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in actions} == {1, 2}
    for rank in range(4):
        mine = [event for event in actions if event["tid"] == rank]
        forwards = [event for event in mine if event["cat"] == "forward"]
        # Eight microbatches through two stages, in two steps; the loss is part of the last one's forward.
        losses = 16 if rank == {"zero-bubble-v": 0}.get(name, 3) else 0
        assert len(forwards) == 2 * 8 * 2 + losses
        assert any(event["cat"] == "update" for event in mine)
        ends = [(event["ts"], event["ts"] + event["dur"]) for event in mine]
        assert all(end <= begin + 1 for (_, end), (begin, _) in itertools.pairwise(ends))
