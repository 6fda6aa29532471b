"""``ballast.client`` and the commands on it, with an operator, an API server and pods that are processes."""

import asyncio
import json
import re
import sys
import textwrap

import pytest
from ballast.client import AsyncClient, Client, JobFailed, NotFound, Refused, WaitedTooLong, training_job
from ballast_client import Checkpoints
from ballast_operator.cli.main import main
from click.testing import CliRunner

from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

TALKS = textwrap.dedent(
    """
    import json, os, pathlib, time
    rank = os.environ["RANK"]
    for step in range(1, 4):
        # The trainer's rank 0 writes a step's line as JSON.
        print(json.dumps({"step": step}) if rank == "0" else f"step {step} of rank {rank}", flush=True)
    while not pathlib.Path(os.environ["UNTIL"]).exists():
        time.sleep(0.05)
    print("step 4, the end", flush=True)
    """
)


@pytest.fixture
def ballast(live_cluster, stage):
    """The command, in the test's namespace."""

    def call(*words):
        where = ("--kubeconfig", str(live_cluster.kubeconfig))
        if words[0] != "jobs":
            where += ("--namespace", stage.namespace)
        return CliRunner().invoke(main, [words[0], *where, *words[1:]])

    return call


@pytest.fixture
def client(live_cluster, stage):
    """The Python client, in the test's namespace."""
    with Client(str(live_cluster.kubeconfig), namespace=stage.namespace) as found:
        yield found


def talking(name, until, **more):
    return training_job(
        name,
        image="not-read",
        command=[sys.executable, "-c", TALKS],
        steps=4,
        environment={"UNTIL": str(until)},
        **more,
    )


def test_a_job_is_submitted_followed_and_deleted_by_commands(stage, ballast, tmp_path):
    """From flags; its ranks' lines come as one log by step; it is listed by namespace, state and team."""
    until = tmp_path / "until"
    with stage.operator():
        flags = f"--name one --image not-read --steps 4 --gpus 2 --env UNTIL={until}".split()
        done = ballast("submit", *flags, "--", sys.executable, "-c", TALKS)
        assert done.exit_code == 0, done.output
        assert f"{stage.namespace}/one submitted; `ballast explain one -n {stage.namespace}`" in done.stdout
        said = [text for step in (1, 2, 3) for text in (f'{{"step": {step}}}', f"step {step} of rank 1")]
        eventually(
            lambda: [line[6:] for line in ballast("logs", "one").stdout.splitlines()] == said,
            "both ranks' lines",
        )
        assert ballast("logs", "one", "--rank", "1", "--tail", "1").stdout == "[1-1] step 3 of rank 1\n"
        (listed,) = json.loads(ballast("jobs", "-n", stage.namespace, "--output", "json").stdout)["items"]
        assert listed["metadata"]["name"] == "one" and listed["kind"] == "TrainingJob"
        row = ballast(
            "jobs", "-n", stage.namespace, "--state", "starting", "--state", "running", "--output", "wide"
        ).stdout.splitlines()
        assert len(row) == 2 and stage.pods("one")["one-1-0"].spec.node_name in row[1]
        assert "no such jobs" in ballast("jobs", "-n", stage.namespace, "--team", "vision").stdout
        until.touch()
        followed = ballast("logs", "one", "--follow")
        assert followed.exit_code == 0, followed.output
        assert sum("the end" in line for line in followed.stdout.splitlines()) == 2
        assert stage.state("one") == "Succeeded"
        refused = ballast("suspend", "one")
        assert refused.exit_code == 1 and "it has ended. To fix: " in refused.stderr
        assert ballast("delete", "one").exit_code == 0
        eventually(lambda: stage.job("one") is None, "the job to go")
        assert "not found" in ballast("delete", "one").stderr


def test_a_dry_run_says_where_and_when_a_job_would_run(stage, ballast, monkeypatch, tmp_path):
    """By the operator's own decisions, with the other jobs; nothing is kept. What can never run says why."""
    words = ["--name", "dry", "--image", "i", "--steps", "3600", "--dry-run"]
    done = ballast("submit", *words, "--gpus", "2", "--", "true")
    assert done.exit_code == 0, done.output
    assert "dry: valid; starts now on 2 x " in done.stdout and "its speed is a guess" in done.stdout
    (row,) = json.loads(ballast("submit", *words, "--output", "json", "--", "true").stdout)["jobs"]
    assert (row["begins_seconds"], row["speed_measured"]) == (0.0, False)
    assert row["gpu_hours"] == pytest.approx(row["ends_seconds"] / 3600)
    done = ballast("submit", *words, "--gpus", "64", "--", "true")
    assert "where it would run is not known: " in done.stdout and "64" in done.stdout
    done = ballast("submit", *words, "--gpu-type", "UPPER CASE", "--", "true")
    assert done.exit_code == 1 and "spec.gpuTypes" in done.stderr
    limited = training_job("dry", image="i", command=["true"], steps=3600)
    limited["spec"] |= {"activeDeadlineSeconds": 720, "deadline": "2001-01-01T00:00:00Z"}
    (tmp_path / "limited.yaml").write_text(json.dumps(limited))
    done = ballast("submit", "-f", str(tmp_path / "limited.yaml"), "--dry-run")
    assert "stopped, not done, after 0.20 h by spec.activeDeadlineSeconds" in done.stdout
    limited["spec"].pop("activeDeadlineSeconds")
    (tmp_path / "limited.yaml").write_text(json.dumps(limited))
    done = ballast("submit", "-f", str(tmp_path / "limited.yaml"), "--dry-run")
    assert "done after 1.01 h, after spec.deadline" in done.stdout
    assert stage.job("dry") is None
    assert ballast("submit", *words, "--within", "nan", "--", "true").exit_code == 2
    monkeypatch.setattr("ballast_operator.allocator.forecast.MOST_WORK", 1000)
    done = ballast("submit", *words, "--steps", str(10**12), "--within", "8760", "--", "true")
    reach = re.search(
        r"after (\S+) of 8760 h this forecast has taken too many .* To fix: --within (\S+)", done.stdout
    )
    assert "not done within " in done.stdout and 0.8 < float(reach[2]) / float(reach[1]) < 1
    done = ballast("submit", *words, "--steps", str(10**12), "--within", reach[2], "--", "true")
    assert done.exit_code == 0 and "too many" not in done.stdout


def test_each_of_several_jobs_is_waited_for(stage, ballast, tmp_path):
    """Also where the first has failed: exit code 1 comes once all have ended."""
    failing = training_job("fails", image="no", command=[sys.executable, "-c", "exit(3)"], steps=1)
    failing["spec"]["backoffLimit"] = 0
    works = training_job("works", image="no", command=[sys.executable, "-c", ""], steps=1)
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"kind": "List", "items": [failing, works]}))
    with stage.operator():
        done = ballast("submit", "-f", str(file), "--wait")
    assert done.exit_code == 1 and "fails: Failed" in done.stderr
    assert stage.state("works") in ("Succeeded", "Failed") and "/works: " in done.stderr


def test_a_job_is_waited_for_suspended_and_resumed_from_python(stage, client, tmp_path):
    """Each change is seen; a wait ends with the state, an error, or its time."""
    until = tmp_path / "until"
    with stage.operator():
        assert client.submit(talking("two", until, gpus=2), dry_run=True).name == "two"
        with pytest.raises(NotFound):
            client.get("two")
        client.submit(talking("two", until, gpus=2))
        job = client.wait("two", states=["Starting", "Running"], timeout=WAIT_SECONDS)
        assert (job.gpus, job.total_steps, job.finished) == (2, 4, False)
        with pytest.raises(WaitedTooLong):
            client.wait("two", timeout=0.1)
        client.suspend("two")
        client.wait("two", states=["Suspended"], timeout=WAIT_SECONDS)
        client.resume("two")
        until.touch()
        states = [job.state for job in client.watch("two")]
        assert states[-1] == "Succeeded"
        assert client.cost("two").so_far >= 0
        assert "two" in client.list()._repr_html_()
        failing = training_job("three", image="no", command=[sys.executable, "-c", "exit(3)"], steps=1)
        failing["spec"]["backoffLimit"] = 0
        client.submit(failing)
        with pytest.raises(JobFailed, match="three: Failed"):
            client.wait("three", timeout=WAIT_SECONDS)
        shown = []

        class Handle:
            update = staticmethod(shown.append)

        client.show(every=0.01, display=lambda jobs, display_id: shown.append(jobs) or Handle())
        assert {job.name for job in shown[-1]} == {"two", "three"}


async def test_the_asynchronous_client_has_the_same_methods(live_cluster, stage, tmp_path):
    """Several jobs are waited for at once."""
    until = tmp_path / "until"
    until.touch()
    with stage.operator():
        async with AsyncClient(str(live_cluster.kubeconfig), namespace=stage.namespace) as client:
            for name in ("a", "b"):
                await client.submit(talking(name, until))
            waits = (client.wait(name, timeout=WAIT_SECONDS) for name in ("a", "b"))
            assert [job.state for job in await asyncio.gather(*waits)] == ["Succeeded"] * 2
            # What is left of a job that has ended: its pods, or the reason that there is no log.
            try:
                assert [line.text async for line in client.logs("a")][-1] == "step 4, the end"
            except NotFound as error:
                assert "has a log" in str(error)
            with pytest.raises(Refused, match="unknown field"):
                await client.submit({**talking("c", until), "spec": {"totalStep": 1}})


def test_the_quick_start_in_python_does_what_it_says(live_cluster, stage, monkeypatch, capsys):
    """The page's own lines, unchanged."""
    from tests.docs.blocks import ROOT

    text = (ROOT / "docs/quickstart.md").read_text()
    (lines,) = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    monkeypatch.setenv("KUBECONFIG", str(live_cluster.kubeconfig))
    with stage.operator():
        exec(compile(lines, "quickstart.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert {"0 step 20", "1 step 20"} <= set(said)
    assert said[-1].startswith("Succeeded ")


def step(status):
    return (status.get("progress") or {}).get("step", 0)


def test_a_script_is_asked_to_save_resumes_and_succeeds(stage):
    """Two ranks find each other, report, leave after the same step, and continue with the next one."""
    with stage.operator():
        stage.add_command("one", ranks=2, total=1_000_000)
        eventually(lambda: step(stage.status("one")) > 0, "progress")
        eventually(lambda: stage.condition("one", "Reporting").get("status") == "True", "the condition")
        stage.patch("one", {"suspend": True})
        stage.wait_for("one", "Suspended")
        status = stage.status("one")
        assert not status.get("restarts")
        saved, _ = Checkpoints(stage.job("one")["spec"]["checkpoint"]["path"]).newest()
        assert saved >= step(status)
        stage.patch("one", {"suspend": False, "totalSteps": saved + 20})
        status = stage.wait_for("one", "Succeeded")
        assert status["launches"] == 2 and not status.get("restarts")
        eventually(lambda: step(stage.status("one")) == saved + 20, "the last step")
