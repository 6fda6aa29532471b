"""Where figures go: the console, files, Prometheus, TensorBoard, a writer of the user's own."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import urllib.request

import pytest
import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Report
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.device import peak_memory
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.reporting.console import JsonReporter, ProgressLine, SilentReporter, TextReporter
from ballast_trainer.reporting.prometheus import PrometheusWriter
from ballast_trainer.reporting.writers import (
    JsonLinesWriter,
    TensorBoardWriter,
    WritingReporter,
    scalars_of,
    writers_of,
)
from ballast_trainer.terminal import ERASE

from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.ports import free_port, loopbacks
from tests.support.waiting import WAIT_SECONDS, eventually
from tests.trainer.models.small_vocabulary import batches

STAGES = [
    {"rank": 0, "firstLayer": 0, "endLayer": 3},
    {"rank": 1, "firstLayer": 3, "endLayer": 8},
    {"rank": 0, "firstLayer": 8, "endLayer": 9},
]


def fields(step, **more):
    return {"step": step, "loss": 2.5, "step_seconds": 0.05, "stages": STAGES, "bubble": None, **more}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Recording:
    def __init__(self):
        self.seen = []

    def scalars(self, step, values):
        self.seen.append((step, dict(values)))

    def event(self, name, step, fields):
        self.seen.append((name, step, dict(fields)))

    def close(self):
        self.seen.append("closed")


def test_scalars_are_the_numbers_and_what_the_stages_say():
    """Nothing that is unknown, no step; ranks and layers of the fullest one."""
    assert scalars_of(fields(3)) == {"loss": 2.5, "step_seconds": 0.05, "ranks": 2.0, "most_layers": 5.0}


def test_writers_get_what_is_printed():
    """Steps and events reach the console and every writer, then the end."""
    out, writer = io.StringIO(), Recording()
    reporter = WritingReporter(JsonReporter(out), [writer])
    reporter.step(**fields(1))
    reporter.event("rebalance", step=1, pause_ms=12.0)
    reporter.close()
    assert [json.loads(line).get("event") for line in out.getvalue().splitlines()] == [None, "rebalance"]
    assert writer.seen == [(1, scalars_of(fields(1))), ("rebalance", 1, {"pause_ms": 12.0}), "closed"]


def test_a_writer_that_fails_is_dropped_and_training_continues(caplog):
    """A full disk is a warning, once; the other writers continue."""

    class Full(Recording):
        def scalars(self, step, values):
            raise OSError("no space left on device")

    healthy = Recording()
    reporter = WritingReporter(SilentReporter(), [Full(), healthy])
    for step in (1, 2):
        reporter.step(**fields(step))
    assert [step for step, _ in healthy.seen] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == ["Full is dropped: no space left on device"]


def test_json_lines_are_appended(tmp_path):
    """A restart continues the same file, after a line that a full disk has torn; each line has its time."""
    path = tmp_path / "new/metrics.jsonl"
    for step in (1, 2):
        if step == 2:
            path.write_text(path.read_text() + '{"torn')
        writer = JsonLinesWriter(path)
        writer.scalars(step, {"loss": 1.5})
        writer.event("checkpoint", step, {"pause_ms": 3.0})
        writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line != '{"torn']
    assert [line["step"] for line in lines] == [1, 1, 2, 2]
    assert all(line["time"] > 0 for line in lines)
    assert lines[3]["event"] == "checkpoint"


def test_json_lines_go_into_a_pipe(tmp_path):
    """Whose end nobody can look at."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = JsonLinesWriter(tmp_path / "pipe")
    writer.scalars(1, {"loss": 1.5})
    writer.close()
    assert json.loads(os.read(reader, 1000))["step"] == 1
    os.close(reader)


@pytest.mark.parametrize("address", loopbacks())
def test_prometheus_serves_steps_events_and_pauses(address):
    """Over HTTP, as a scraper sees it, at a pod's IPv6 address, too; what is not known is absent."""
    port = free_port()
    writer = PrometheusWriter(port)
    try:
        writer.scalars(7, {"loss": 2.5, "step_seconds": 0.05, "ranks": 4.0})
        writer.event("rebalance", 7, {"pause_ms": 25.0})
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=WAIT_SECONDS) as answer:
            text = answer.read().decode()
    finally:
        writer.close()
    assert "ballast_trainer_step 7.0" in text
    assert "ballast_trainer_loss 2.5" in text
    assert "ballast_trainer_ranks 4.0" in text
    assert 'ballast_trainer_events_total{event="rebalance"} 1.0' in text
    assert 'ballast_trainer_pause_seconds_bucket{event="rebalance",le="0.03"} 1.0' in text
    assert "ballast_trainer_step_seconds_count 1.0" in text
    assert "ballast_trainer_bubble" not in text
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=WAIT_SECONDS)


def test_a_metrics_port_in_use_is_refused_with_the_reason():
    """Two jobs on one machine need two ports."""
    port = free_port()
    first = PrometheusWriter(port)
    try:
        with pytest.raises(ConfigurationError, match="another port") as caught:
            PrometheusWriter(port)
    finally:
        first.close()
    assert caught.value.field == "metrics.port"


def test_tensorboard_is_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard.writer", raising=False)
    with pytest.raises(ConfigurationError, match="install tensorboard") as caught:
        TensorBoardWriter(tmp_path)
    assert caught.value.field == "metrics.tensorboard"


def test_a_tensorboard_folder_that_cannot_be_made_is_refused(tmp_path):
    """As a file of JSON lines is."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match=r"metrics\.tensorboard: cannot write .*To fix"):
        TensorBoardWriter(tmp_path / "taken/runs")


def test_tensorboard_files_hold_the_curves(tmp_path):
    """Where it is installed: scalars by name, and pauses."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.scalars(1, {"loss": 2.5})
    writer.event("rebalance", 1, {"pause_ms": 25.0})
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Scalars("loss")[0].value == 2.5
    assert read.Scalars("pause_ms/rebalance")[0].value == 25.0


@pytest.mark.parametrize(
    ("metrics", "field", "words"),
    [
        ({"writer": "json:JSONDecoder"}, "metrics.writer", "without scalars, event, close()"),
        (
            {"writer": "json:loads"},
            "metrics.writer",
            "'json:loads' fails, called without arguments: .*To fix",
        ),
        ({"writer": "sys:exit"}, "metrics.writer", "SystemExit"),
        ({"jsonLines": "/dev/null/metrics"}, "metrics.jsonLines", "cannot write"),
    ],
)
def test_metrics_that_cannot_work_are_refused_with_their_field(metrics, field, words):
    with pytest.raises(ConfigurationError, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        writers_of(
            JobConfig.from_mapping({"totalSteps": 1, "model": {"name": "gpt"}, "metrics": metrics}).metrics
        )
    assert caught.value.field == field


class NarrowTerminal(Terminal):
    encoding = "ascii"


def test_the_line_on_a_terminal_moves_and_events_stay(monkeypatch):
    """Bar, loss, speed, layers of each stage and what is left, in place; events on lines of their own."""
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    clock = itertools.count(0.0, 1.0)
    line = ProgressLine(60, out, clock=lambda: next(clock))
    for step in (10, 20):
        line.show(fields(step))
    shown = out.getvalue().split(ERASE)
    assert "\n" not in out.getvalue()
    assert shown[2].startswith("━" * 8 + " " * 17 + "step")
    assert "step 20/60 loss 2.5000 50 ms layers 3,5,1 0:04 left" in shown[2]
    line.show(fields(5))  # after the loss of a rank
    assert "left" not in out.getvalue().split(ERASE)[3]

    monkeypatch.setenv("COLUMNS", "40")
    out = NarrowTerminal()
    ProgressLine(60, out).show(fields(60))
    assert out.getvalue() == ERASE + "=" * 24 + " step 60/60 los"

    out = Terminal()
    reporter = TextReporter(60, out)
    reporter.step(**fields(1))
    reporter.event("rebalance", step=1, pause_ms=12.3456)
    assert out.getvalue().endswith("\r\x1b[Krebalance  step=1  pause_ms=12.35\n")


def test_a_terminal_that_is_closed_does_not_end_the_training():
    """What it would show is lost, and the job can still save."""
    held, shown = os.openpty()
    out = os.fdopen(shown, "w")
    reporter = TextReporter(60, out)
    reporter.step(**fields(1))
    os.close(held)
    for _ in range(2):  # the first leaves behind what it could not write
        reporter.step(**fields(60))
    reporter.event("ended", step=60)
    with contextlib.suppress(OSError):
        out.close()


def test_a_file_gets_a_line_now_and_then():
    """Without a terminal one step in twenty, the last one, and what is emulated."""
    out = io.StringIO()
    reporter = TextReporter(40, out)
    for step in range(1, 41):
        reporter.step(**fields(step, emulated=10.0))
    lines = out.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1] == "step 40/40  loss 2.5000  50 ms  layers 3,5,1  emulated x10"


@pytest.mark.parametrize(("allocated", "told"), [(7 << 30, 7 << 30), (0, None)])
def test_the_memory_of_the_fullest_gpu_is_told(monkeypatch, small_config, tmp_path, allocated, told):
    """What the allocator counts where there is one."""
    asked = []
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: [asked.append(device), allocated][1]
    )
    device = torch.device("cuda" if allocated else "cpu")
    monkeypatch.setattr("ballast_trainer.loop.step.peak_memory", lambda _: peak_memory(device))
    path = tmp_path / "metrics.jsonl"
    train_here(small_config(totalSteps=2, metrics={"jsonLines": str(path)}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("peak_memory_bytes") for line in lines if "loss" in line] == [told, told]
    assert bool(asked) == bool(allocated)


@pytest.mark.processes
def test_a_run_prints_what_is_promised_and_serves_its_metrics(gang, small_config, tmp_path):
    """``--log json``: the promised fields; the same figures in the file; a scrape while it trains."""
    port = free_port()
    metrics = {"jsonLines": str(tmp_path / "metrics.jsonl"), "port": port}
    saved = {"path": str(tmp_path / "saved"), "everySteps": 5}
    running = gang(small_config(totalSteps=100_000, metrics=metrics, checkpoint=saved), ranks=2)
    running.wait_for_step(6)

    def scraped():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as answer:
            return answer.read().decode()

    eventually(lambda: re.search('events_total{event="checkpoint"} [1-9]', scraped()), "a checkpoint")
    text = scraped()
    assert "ballast_trainer_ranks 2.0" in text
    running.signal("rank-1", signal.SIGTERM)
    assert set(running.exit_codes().values()) == {75}, running.errors()
    steps = [line for line in running.lines("rank-0") if "event" not in line]
    assert {"step", "loss", "step_seconds", "stages"} <= set(steps[0])
    assert steps[0]["stages"] == [
        {"rank": 0, "firstLayer": 0, "endLayer": 4},
        {"rank": 1, "firstLayer": 4, "endLayer": 8},
    ]
    assert steps[0]["bubble_schedule"] is None
    assert 0 < steps[-1]["bubble_schedule"] < 1
    assert "ballast_trainer_bubble_imbalance" in text
    assert steps[-1]["flops_per_second"] > 0
    assert steps[-1]["part_of_peak"] is None
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert not running.lines("rank-1")
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["loss"] for line in written if "loss" in line}
    assert curve == running.losses()
    assert {line["event"] for line in written if "event" in line} == {"launch", "checkpoint", "ended"}


def some_ignored():
    """All targets of steps 2 and 3 are ignored."""
    plain = batches(step=-1, vocabulary=64, length=8)

    def batch(seed, step, size):
        inputs, targets = plain(seed, step, size)
        return inputs, targets.fill_(-100) if step in (1, 2) else targets

    return batch


def test_training_continues_and_says_so_and_the_operator_still_hears_of_it(tmp_path, caplog):
    """Reports go on, without a loss where it is not a number."""
    model, data = "tests.trainer.models.small_vocabulary:build", f"{__name__}:some_ignored"
    config = small_job(model, data=data, steps=5, metrics={"jsonLines": str(tmp_path / "lines")})
    told = train_here(config, channel=DirectoryChannel(tmp_path))
    assert [math.isnan(told.losses[step]) for step in range(1, 6)] == [False, True, True, False, False]
    assert caplog.text.count("the loss of step 2 is nan; its gradients are finite") == 1
    assert "the loss of step 3" not in caplog.text
    report = Report.from_json((tmp_path / "report.json").read_text())
    assert (report.step, report.loss) == (5, told.losses[5])
    assert (tmp_path / "finished-step").read_text() == "5"
    lines = [json.loads(line, parse_constant=int) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line][1:3] == [None, None]


def test_lines_have_null_for_it(tmp_path):
    """JSON has no NaN, and strict readers refuse it."""
    out = io.StringIO()
    reporter = JsonReporter(out)
    reporter.step(step=1, loss=math.nan)
    reporter.event("evaluate", step=1, loss=math.inf)
    step, event = (json.loads(line, parse_constant=int) for line in out.getvalue().splitlines())
    assert step == {"step": 1, "loss": None}
    assert event == {"event": "evaluate", "step": 1, "loss": None}
