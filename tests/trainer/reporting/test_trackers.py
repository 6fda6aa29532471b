"""Trackers, by stand-ins of their clients: what is asked of them and what refuses it; torch's profiler."""

import json
import sys
import types

import pytest
from ballast_policies.contract.job.output import MetricsConfig, MlflowConfig, WandbConfig
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.reporting.console import SilentReporter
from ballast_trainer.reporting.writers import WritingReporter, writers_of

from tests.support.jobs import small_job
from tests.support.one_process import train_here


class Client(types.ModuleType):
    """A client's module that notes each call; ``runs``: by name, those that its server has."""

    def __init__(self, name, runs=(), fails=None):
        super().__init__(name)
        self.calls, self.runs, self.fails = [], runs, fails

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*arguments, **options):
            if name == self.fails:
                raise LookupError("no key")
            self.calls.append((name, *arguments, options) if options else (name, *arguments))
            if name == "start_run":
                info = types.SimpleNamespace(run_id=options.get("run_id", "r8"))
                return types.SimpleNamespace(info=info)
            if name == "search_runs":
                wanted = options["filter_string"].split("'")[1]
                info = types.SimpleNamespace(run_id="r7")
                return [types.SimpleNamespace(info=info)] if wanted in self.runs else []
            return self

        return called


@pytest.fixture
def client(monkeypatch):
    def install(name, **settings):
        made = Client(name, **settings)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return install


def report(config):
    reporter = WritingReporter(SilentReporter(), writers_of(config, {"totalSteps": 3}))
    reporter.step(step=1, loss=2.5)
    reporter.event("checkpoint", step=1, pause_ms=4.0)
    reporter.event("launch", step=1)
    reporter.close()


def test_wandb_gets_the_job_its_curves_and_its_pauses(client):
    """A named run is continued by the next launch; steps done again are points like others."""
    wandb = client("wandb")
    report(MetricsConfig(wandb=WandbConfig(project="pipelines", name="first")))
    named = {"name": "first", "id": "first", "resume": "allow"}
    about = {"project": "pipelines", "entity": None, "config": {"totalSteps": 3}}
    assert wandb.calls == [
        ("init", about | named),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"step": 1, "loss": 2.5}),
        ("log", {"step": 1, "event/checkpoint": 4.0}),
        ("log", {"step": 1, "event/launch": 1}),
        ("finish",),
    ]


@pytest.mark.parametrize("runs", [(), ("first",)])
def test_mlflow_continues_the_newest_run_of_the_name_or_begins_it(client, runs):
    """With the job's configuration beside the curves of a new one; by its id, whichever thread trains."""
    mlflow = client("mlflow", runs=runs)
    config = MlflowConfig(tracking_uri="http://mlflow:5000", experiment="pipelines", name="first")
    report(MetricsConfig(mlflow=config))
    begins = [("start_run", {"run_name": "first"}), ("log_dict", {"totalSteps": 3}, "job.json")]
    names = [call[0] for call in mlflow.calls]
    assert names[:3] == ["set_tracking_uri", "set_experiment", "search_runs"]
    run = "r7" if runs else "r8"
    assert mlflow.calls[3:] == [
        *([("start_run", {"run_id": "r7"})] if runs else begins),
        ("log_metrics", {"loss": 2.5}, {"step": 1, "run_id": run}),
        ("log_metric", "event/checkpoint", 4.0, {"step": 1, "run_id": run}),
        ("log_metric", "event/launch", 1.0, {"step": 1, "run_id": run}),
        ("MlflowClient",),
        ("set_terminated", run),
    ]


BOTH = {
    "wandb": MetricsConfig(wandb=WandbConfig(project="pipelines")),
    "mlflow": MetricsConfig(mlflow=MlflowConfig(experiment="pipelines")),
}


@pytest.mark.parametrize("name", BOTH)
def test_a_tracker_that_is_not_installed_is_refused_with_the_package(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"metrics.{name}: .*To fix: pip install {name}"):
        writers_of(BOTH[name])


@pytest.mark.parametrize(("name", "call"), [("wandb", "init"), ("mlflow", "set_experiment")])
def test_a_run_that_cannot_begin_is_told_in_words(client, name, call):
    """Whatever error the client has for it."""
    client(name, fails=call)
    with pytest.raises(ConfigurationError, match=rf"metrics.{name}: no run .*LookupError: no key. To fix: "):
        writers_of(BOTH[name])


def test_a_tracker_that_fails_later_is_dropped(client, caplog):
    client("wandb", fails="log")
    report(BOTH["wandb"])
    assert "WandbWriter is dropped: no key" in caplog.text


def small(**fields):
    model = {"name": "gpt", "layers": 4, "args": {"dim": 16, "heads": 2, "context": 8}}
    return small_job(model, steps=5, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "files"), [([], {"rank-0.steps-2-3.json"}), ([1], set())])
def test_chosen_steps_and_ranks_are_traced_by_torchs_profiler(tmp_path, ranks, files):
    """As Chrome's traces, with torch's own operations; the losses are those without it."""
    folder = tmp_path / "traces"
    profiling = {"path": str(folder), "firstStep": 2, "steps": 2, "ranks": ranks}
    assert train_here(small(profiling=profiling)).losses == train_here(small()).losses
    assert {path.name for path in folder.iterdir()} == files
    for name in files:
        trace = json.loads((folder / name).read_text())
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.slow
def test_a_job_that_ends_within_its_trace_writes_what_there_is(tmp_path):
    """The steps that ran are in the name."""
    train_here(small(profiling={"path": str(tmp_path), "firstStep": 4, "steps": 9}))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.steps-4-5.json"]


@pytest.mark.parametrize(
    ("profiling", "words"),
    [
        ({"path": "/proc/none/here"}, r"profiling.path: rank 0 cannot write there: .*To fix: "),
        ({"path": "{}", "memorySnapshot": True}, r"profiling.memorySnapshot: ranks compute on cpu.*To fix: "),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_before_the_first_step(tmp_path, profiling, words):
    """A place without permission; a snapshot of what is not recorded."""
    with pytest.raises(ConfigurationError, match=words):
        train_here(small(profiling=profiling | {"path": profiling["path"].format(tmp_path)}))
