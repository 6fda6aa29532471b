"""``ballast.client`` and the commands on it, against what is wrong: no cluster, no answer, hostile values."""

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ballast.client import (
    AsyncClient,
    Client,
    Job,
    Jobs,
    LoggedOut,
    NotConnected,
    NotFound,
    Refused,
    aio,
    training_job,
)
from ballast.client.connection import Connection, read_json
from ballast.client.logs import Follower, Pod, merged
from ballast_operator.cli.live.connection import cluster_errors
from ballast_operator.cli.main import main
from ballast_operator.errors import Unreachable
from click import ClickException
from click.shell_completion import BashComplete
from click.testing import CliRunner

from tests.support.servers import a_kubeconfig

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def answers(tmp_path):
    """``answers(body, ...)``: an API server that says this to each request; the path of its kubeconfig.

    ``body``: bytes, or a function of the path to (bytes, status). ``date``: what it says the time is.
    """
    servers = []

    def start(body, status=200, date=""):
        def answer(handler):
            said, code = body(handler.path) if callable(body) else (body, status)
            handler.send_response_only(code)
            handler.send_header("Date", date or handler.date_time_string())
            handler.send_header("Content-Length", str(len(said)))
            handler.end_headers()
            handler.wfile.write(said)

        verbs = {f"do_{verb}": answer for verb in ("GET", "POST", "PATCH", "DELETE")}
        handler = type("Handler", (BaseHTTPRequestHandler,), {**verbs, "log_message": lambda *_: None})
        servers.append(server := HTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return kubeconfig(tmp_path, server.server_port)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def kubeconfig(folder, port):
    return a_kubeconfig(folder / f"kubeconfig-{port}", f"http://127.0.0.1:{port}")


def refused(*words, code=1, file=None):
    """What a command says on standard error, which is a message and not a traceback."""
    done = CliRunner().invoke(main, words, input=file)
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output and "To fix: " in done.stderr
    return " ".join(done.stderr.split())


COMMANDS = [
    ("jobs",),
    ("logs", "one"),
    ("suspend", "one"),
    ("resume", "one"),
    ("delete", "one"),
    ("doctor",),
    ("support-bundle",),
    ("submit", "--name", "one", "--image", "i", "--steps", "1", "--", "true"),
    ("cost",),
    ("explain", "one"),
    ("top", "--once"),
    ("whatif",),
]


async def test_a_token_that_ran_out_is_read_again(answers):
    """A cloud's plugin makes one for minutes; who waits for a job waits for days."""
    asked = []

    def answer(path):
        asked.append(path)
        return b"{}", 401 if len(asked) == 2 else 200

    connection = Connection(answers(answer), timeout=60.0)
    assert [await connection.request("get", "/version") for _ in range(2)] == [{}, {}]
    assert len(asked) == 3
    await connection.close()


def test_nobody_in_particular_is_not_asked_for(answers):
    """Where no token can be read again: such requests are forbidden, and it is to log in that is needed."""
    asked = []

    def answer(path):
        asked.append(path)
        file.write_text(without)
        return b"{}", 401

    file = Path(answers(answer))
    without = file.read_text()
    file.write_text(without.replace("user: {}", "user: {token: secret}"))
    with Client(kubeconfig=str(file)) as client, pytest.raises(LoggedOut):
        client.get("job")
    assert len(asked) == 1


@pytest.mark.parametrize("command", ["top", "cost", "whatif"])
@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        (401, "Unauthorized", "log in again"),
        (403, 'User "u" cannot list resource "trainingjobs"', "ask for the right"),
        (404, "the server could not find the requested resource", "install Ballast's custom"),
        (503, "apiserver is shutting down", "give --kubeconfig"),
    ],
)
def test_what_the_operators_own_client_is_refused_is_told_with_what_to_do(
    answers, command, status, message, fix
):
    where = answers(json.dumps({"kind": "Status", "message": message}).encode(), status)
    once = ("--once",) if command == "top" else ()
    assert f"To fix: {fix}" in refused(command, "--kubeconfig", where, *once)


@pytest.mark.parametrize(
    "words",
    [words for words in COMMANDS if words[0] not in ("doctor", "support-bundle")],
    ids=lambda words: words[0],
)
def test_without_ballasts_definitions_each_command_says_so(words, answers):
    """The API server answers with a line of text where it does not know a group."""
    where = answers(lambda path: (b"404 page not found\n", 404) if "ballast.dev" in path else (b"{}", 200))
    said = refused(words[0], "--kubeconfig", where, *words[1:])
    assert said.endswith("To fix: install Ballast's custom resource definitions (`ballast crds`)")


@pytest.mark.parametrize(("status", "fix"), [(401, "an administrator's account"), (503, "the connection")])
def test_a_demo_on_a_cluster_that_refuses_it_ends_with_its_words(answers, status, fix):
    """So does one without a cluster that answers, or with a file that is no kubeconfig."""
    where = answers(json.dumps({"kind": "Status", "message": "not for \x1b[2Jyou"}).encode(), status)
    said = refused("demo", "--kubeconfig", where)
    assert f"HTTP {status}" in said and "not for \N{REPLACEMENT CHARACTER}[2Jyou" in said and fix in said
    assert "check the kubeconfig" in refused("demo", "--kubeconfig", kubeconfig(Path(where).parent, 1))
    Path(where).write_text("{")
    assert "check the kubeconfig" in refused("demo", "--kubeconfig", where)


def test_the_parts_of_a_cost_are_all_of_it():
    """A pool's: its GPUs, and the data that was read from other regions there."""
    pools = [{"pool": "a", "cost": 2.0, "dataCost": 0.5}, {"pool": "b", "cost": 1.0}]
    cost = Job({"status": {"costSoFar": 3.5, "poolCosts": pools}}).cost
    assert cost.by_pool == {"a": 2.5, "b": 1.0} and sum(cost.by_pool.values()) == cost.so_far


def test_requests_at_once_share_a_login(answers, tmp_path):
    """A cloud's plugin is asked once; its answer takes a second or two."""
    where, asked = answers(b'{"items": []}'), tmp_path / "asked"
    found = {
        "kind": "ExecCredential",
        "apiVersion": "client.authentication.k8s.io/v1",
        "status": {"token": "t"},
    }
    plugin = {"apiVersion": found["apiVersion"], "command": "sh", "interactiveMode": "Never"}
    plugin["args"] = ["-c", f"echo >> {asked}; echo '{json.dumps(found)}'"]
    content = yaml.safe_load(Path(where).read_text())
    content["users"][0]["user"] = {"exec": plugin}
    Path(where).write_text(yaml.safe_dump(content))

    async def ask():
        async with AsyncClient(where) as client:
            await asyncio.gather(*(client.list(namespace="") for _ in range(5)))

    asyncio.run(ask())
    assert asked.read_text() == "\n"


@pytest.mark.parametrize("words", [*COMMANDS, ("ui", "--no-open")], ids=lambda words: words[0])
def test_without_a_cluster_each_command_says_so(words, tmp_path, monkeypatch):
    """No kubeconfig, one that is none, and a server that does not answer."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = refused(*words)
    assert "there is no kubeconfig: ~/.kube/config does not exist. To fix: " in said and "ballast up" in said
    for text in ("{", "[1]", "a: b", "\x00", "current-context: a\ncontexts: 3", ""):
        (tmp_path / "broken").write_text(text)
        said = refused(words[0], "--kubeconfig", str(tmp_path / "broken"), *words[1:])
        assert str(tmp_path / "broken") in said
        assert "is not a kubeconfig" in said or "Invalid kube-config file" in said
        assert "object" not in said
    said = refused(words[0], "--kubeconfig", kubeconfig(tmp_path, 1), *words[1:])
    assert "no answer to /" in said or "Cannot connect to host" in said


@pytest.mark.parametrize("command", ["delete", "logs", "resume", "suspend"])
def test_a_job_that_is_not_there_is_told_with_where_to_look(answers, command):
    """The API server alone says that it is not found."""
    absent = b'{"kind": "Status", "message": "trainingjobs.ballast.dev \\"one\\" not found"}'
    where = answers(lambda path: (absent, 404) if path.endswith("/one") else (b"{}", 200))
    assert "lists, and its namespace" in refused(command, "one", "--kubeconfig", where)


@pytest.fixture
def examined(answers):
    """``examined(date)``: check -> (status, message) of each finding of `ballast doctor`.

    The account may see neither pods nor Leases; no definitions are installed; the operator's Deployment names
    no account.
    """
    policy = (ROOT / "examples" / "demo" / "00-clusterpolicy.yaml").read_text()
    lists = {"clusterpolicies": [yaml.safe_load(policy)], "nodes": [{"metadata": {"name": "one"}}]}
    lists["deployments"] = [{"metadata": {"name": "a"}, "spec": {"template": {"spec": {}}}}]

    def answer(path):
        last = path.partition("?")[0].rpartition("/")[2]
        refusal = {"pods": 403, "leases": 403}.get(last, 404 if "definitions" in path else 0)
        if refusal:
            return b'{"kind": "Status", "message": "User cannot list resource"}', refusal
        return json.dumps({"items": lists.get(last, [])}).encode(), 200

    def examine(date):
        words = ["doctor", "--kubeconfig", answers(answer, date=date), "--output", "json"]
        done, found = CliRunner().invoke(main, words), {}
        assert isinstance(done.exception, SystemExit), done.output
        for one in json.loads(done.stdout):
            found.setdefault(one["check"], []).append((one["status"], one["message"]))
        return found

    return examine


def test_doctor_tells_of_nodes_and_of_its_clock_what_an_account_may_see(examined):
    """One without a right to pods or to nodes' Leases hears of the rest, and that this is unknown."""
    found = examined("Thu, 01 Jan 2026 00:00:00 GMT")
    for check, told in (("clock", "from the API server's"), ("nodes", "no node is in pool")):
        assert [status for status, _ in found[check]].count("skipped") == 1
        assert any(told in message for _, message in found[check])


@pytest.mark.parametrize("date", ["yesterday", f"Thu, 01 Jan {10**20} 00:00:00 GMT"])
def test_doctor_on_an_api_server_that_tells_no_time(examined, date):
    assert examined(date)["clock"] == [("skipped", "the API server does not say its time")]


def test_rights_in_a_jobs_namespace_are_enough_to_explain_and_bundle_it_and_for_its_cost(answers, tmp_path):
    """ClusterPolicies belong to no namespace: they are left out, and it is said that they are."""

    core = "/api/v1/namespaces/default/"

    def answer(path):
        if ("/namespaces/default" not in path and path != "/version") or (viewer and path.startswith(core)):
            return b'{"kind": "Status", "message": "User cannot list resource"}', 403
        both = {"metadata": {"name": "one", "uid": "u", "resourceVersion": "1"}, "items": []}
        return json.dumps(both).encode(), 200

    viewer = True  # of TrainingJobs alone, as the role ballast-viewer gives them
    where = ("--kubeconfig", answers(answer), "-n", "default")
    explained = CliRunner().invoke(main, ["explain", "one", *where])
    assert explained.exit_code == 0, explained.output
    assert "policy   not shown: " in explained.stdout and "User cannot list resource" in explained.stdout
    assert explained.stdout.count("  not shown ") == 2
    viewer = False
    assert "  not shown " not in CliRunner().invoke(main, ["explain", "one", *where]).stdout
    top = CliRunner().invoke(main, ["top", "--once", *where])
    assert top.exit_code == 0 and "ClusterPolicy not shown: " in top.stdout, top.output
    cost = CliRunner().invoke(main, ["cost", *where, "--output", "json"])
    assert cost.exit_code == 0, cost.output
    for said in (json.loads(cost.stdout)["left_out"], cost.stderr):
        assert "costs since each job's status.costAt" in said and "User cannot list resource" in said
    bundled = CliRunner().invoke(main, ["support-bundle", *where, "--file", str(tmp_path / "b")])
    assert bundled.exit_code == 0, bundled.output
    missing = "clusterpolicies, trainingjobs, nodes, pods, events, leases"
    assert f"not whole: {missing}; their .error.txt files say why\n" in bundled.stderr


@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [
        # Set here, too: what a script starts in the background ignores SIGINT.
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, lambda *_: sys.exit(1), SystemExit),
    ],
)
def test_a_signal_that_ends_a_program_ends_what_it_follows(answers, number, handler, raised):
    """Nothing is raised but what the signal's handler raises, while the API server has not answered."""
    released = threading.Event()

    def answer(path):
        os.kill(os.getpid(), number)
        released.wait(60.0)
        return b"{}", 200

    before = signal.signal(number, handler)
    try:
        with Client(answers(answer)) as client, pytest.raises(raised):
            next(client.logs("one", follow=True))
    finally:
        released.set()
        signal.signal(number, before)


def test_definitions_are_not_written_where_no_folder_can_be():
    assert "/dev/null: " in refused("crds", "--output-dir", "/dev/null")


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[" * 5000, b'{"items": "', b""], ids=repr)
def test_an_answer_that_is_no_json_is_an_error(answers, body):
    with Client(answers(body)) as client, pytest.raises(NotConnected, match="no JSON"):
        client.list()


def test_one_deep_object_does_not_hide_the_others(answers):
    """A custom resource may hold JSON of any depth: it is cut, and the list is read."""
    deep = b'{"metadata": {"name": "deep"}, "x": ' + b"[" * 9000 + b"]" * 9000 + b"}"
    where = answers(b'{"items": [' + deep + b', {"metadata": {"name": "one"}}]}')
    with Client(where) as client:
        assert {job.name for job in client.list()} == {"deep", "one"}
    assert read_json(b'{"a": [1, "]"]}', "x") == {"a": [1, "]"]}


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "Ä", "UPPER", "a" * 300, "a\n"], ids=repr)
def test_a_name_that_no_object_has_is_not_sent(name, answers):
    """It would be a part of a URL: of another object, or of all."""
    where = answers(b"{}")
    assert "there is no TrainingJob" in refused("explain", "--kubeconfig", str(where), "--", name)
    with Client(where) as client:
        for call in (client.get, client.delete, client.suspend):
            with pytest.raises(NotFound, match="To fix: "):
                call(name)
        with pytest.raises(NotFound):
            client.get("one", namespace=name)
        with pytest.raises(NotFound):
            client.submit(training_job(name, image="i", command=["true"], steps=1))
    with Client(where, namespace=name) as client, pytest.raises(NotFound, match="no namespace's name"):
        client.submit(training_job("one", image="i", command=["true"], steps=1))


@pytest.mark.parametrize(
    ("status", "message", "error", "says"),
    [
        (
            403,
            'trainingjobs.ballast.dev is forbidden: User "u" cannot list resource',
            "Forbidden",
            "ask for the",
        ),
        (403, "exceeded quota", "Refused", "quota"),
        (404, "the server could not find the requested resource", "NotFound", "ballast crds"),
        (401, "Unauthorized", "LoggedOut", "log in"),
        (409, 'trainingjobs.ballast.dev "one" already exists', "AlreadyExists", "another name"),
        (422, "spec.totalSteps: Required value", "Refused", "spec.totalSteps"),
        (400, 'strict decoding error: unknown field "spec.a"', "Refused", "To fix: .* `ballast doctor`"),
        (500, "etcdserver: no leader", "NotConnected", "try again"),
    ],
)
def test_what_the_api_server_refuses_is_one_of_the_clients_errors(answers, status, message, error, says):
    """Each with the server's words, and with what to do where they do not say it."""
    where = answers(json.dumps({"kind": "Status", "message": message}).encode(), status)
    with Client(where) as client, pytest.raises(Exception, match=says) as caught:
        client.list()
    assert type(caught.value).__name__ == error and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no manifest"),
        ("{", "not YAML"),
        ("- 1", "is no manifest"),
        ("kind: Pod\napiVersion: v1\nmetadata: {name: a}", "Pod a: it is not a TrainingJob"),
        ("kind: TrainingJob\napiVersion: v1\nmetadata: {name: a}", "apiVersion: 'v1'"),
        ("kind: TrainingJob\napiVersion: ballast.dev/v1alpha1\nspec: {totalSteps: .nan}", "nan is no number"),
        ("kind: TrainingJob\n~: 2", "the key None is no text"),
        ("a: !!binary aGVsbG8=", "bytes is no value"),
        ("a: " + "[" * 80 + "]" * 80, "50 levels"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\n" + "".join(
            f"{chr(c + 1)}: &{chr(c + 1)} [{', '.join([f'*{chr(c)}'] * 9)}]\n" for c in range(98, 110)
        ), "200000 values"),
        ("a: " + "[" * 2000, "100 levels"),
        ("a: " + "9" * 9000, "it is not a TrainingJob"),
        ("x" * (2 << 20), "more than 1 MiB"),
        ("a: \ud800", "not UTF-8"),
        ("kind: TrainingJob\nspec: {totalSteps: 1, totalSteps: 2}", "'totalSteps' is given twice"),
    ],
    ids=range(15),
)  # fmt: skip
def test_a_file_that_holds_no_training_job_is_refused(text, says, tmp_path, answers):
    """Before anything is sent, in a time that its size explains."""
    file = tmp_path / "job.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert says in refused("submit", "--kubeconfig", answers(b"{}"), "-f", str(file))
    assert "No such file" in refused("submit", "--kubeconfig", answers(b"{}"), "-f", str(tmp_path / "none"))


def test_what_submit_prints_of_several_jobs_is_what_kubectl_takes(answers):
    """A List, as that of `ballast jobs`."""
    job = {"apiVersion": "ballast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "one"}}
    job["metadata"] |= {"namespace": "team"}
    words = ("-f", "-", "--output", "json", "--kubeconfig", answers(json.dumps(job).encode()))
    done = CliRunner().invoke(main, ["submit", *words], input=json.dumps(job) + "\n---\n" + json.dumps(job))
    assert json.loads(done.stdout) == {"apiVersion": "v1", "kind": "List", "items": [job, job]}


@pytest.mark.parametrize(
    ("command", "kind", "printed"),
    [
        ("submit", "apiVersion: ballast.dev/v1alpha1\nkind: TrainingJob", "team/one submitted"),
        ("migrate", "apiVersion: adaptdl.petuum.com/v1\nkind: AdaptDLJob", "name: one"),
    ],
)
def test_an_object_of_another_kind_does_not_hide_the_others(command, kind, printed, answers):
    """It is named, and the exit code says that not everything was done."""
    spec = "spec: {template: {spec: {containers: [{name: a, image: a, command: [a]}]}}}"
    text = (
        f"kind: Pod\nmetadata: {{name: a}}\n---\n{kind}\nmetadata: {{name: one}}\n{spec}\n---\nkind: List\n"
    )
    text += "items: [{metadata: 3}]\n"
    job = {"apiVersion": "ballast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "one"}}
    job["metadata"] |= {"namespace": "team"}
    words = {"submit": ("-f", "-", "--kubeconfig", answers(json.dumps(job).encode()))}.get(command, ("-",))
    done = CliRunner().invoke(main, [command, *words], input=text)
    assert done.exit_code == 1 and printed in done.stdout, done.output
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert [line.split(": ")[1] for line in told] == ["Pod a", "an object without kind without name"]
    assert all("To fix: " in line for line in told)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--name", "a"), "--image, --steps, COMMAND: not given"),
        (("--name", "a", "job.yaml"), "To fix: -f job.yaml, or"),
        (("-f", "x", "--gpus", "2"), "-f: not with COMMAND or options of a job"),
        (("--gpus", "²"), "--gpus: '²' is no number"),
        (("--gpus", "4-2"), "fewest above most"),
        (("--gpus", "0"), "has no GPU"),
        (("--env", "=x"), "has no name"),
        (("--budget", "nan"), "nan is no amount"),
        (("--budget", "-1"), "-1.0 is no amount"),
    ],
)
def test_flags_that_make_no_job_are_a_wrong_use(words, says):
    """Exit code 2, as for every option that is wrong."""
    base = () if words[0] in ("-f", "--name") else ("--name", "a", "--image", "i", "--steps", "1")
    command = () if words[0] in ("-f", "--name") else ("--", "true")
    assert says in refused("submit", *base, *words, *command, code=2)


@pytest.mark.parametrize("argument", [{"command": "python train.py"}, {"gpu_types": "v100"}], ids=repr)
def test_a_text_in_place_of_a_list_is_refused(argument):
    """Its letters would be the program's arguments, or types that no node has."""
    with pytest.raises(Refused, match="is one text"):
        training_job("a", image="i", steps=1, **{"command": ["true"], **argument})


@pytest.mark.parametrize(
    ("words", "begun", "names"),
    [
        (["logs"], "o", ["one"]),
        (["explain", "-n", "team"], "", ["one", "two"]),
        (["jobs", "-n"], "t", ["team"]),
        (["cost", "--namespace"], "none", []),
        (["delete", "-n", "forbidden"], "", []),
    ],
)
def test_a_shell_completes_names_of_jobs_and_namespaces(words, begun, names, answers, monkeypatch):
    """Those of the cluster; nothing where it does not tell."""

    def answer(path):
        where = path.partition("?")[0].rstrip("/").split("/")
        there = ["one", "two"] if where[-1] == "trainingjobs" else ["default", "team"]
        found = json.dumps({"items": [{"metadata": {"name": name}} for name in there]})
        return (b"{}", 403) if "forbidden" in where else (found.encode(), 200)

    monkeypatch.setenv("KUBECONFIG", answers(answer))
    found = BashComplete(main, {}, "ballast", "_BALLAST_COMPLETE").get_completions(words, begun)
    assert [one.value for one in found] == names


@pytest.mark.parametrize("states", [["Nonsense"], ["Running", "running"], "Running"], ids=repr)
def test_a_state_that_there_is_not_is_refused_at_once(states, answers):
    """It would be waited for until the job has ended, and no job is listed under it."""
    from ballast_operator.api.conditions import STATES

    with Client(answers(b"{}")) as client:
        for call in (client.list, functools.partial(client.wait, "one")):
            with pytest.raises(Refused, match=f"To fix: give a list of {', '.join(STATES)}$"):
                call(states=states)


def test_a_manifest_of_flags_is_a_training_job():
    """It is what the operator reads, with nothing that was not asked for."""
    from ballast_operator.api.read import read_training_job

    made = training_job("a", image="i", command=["true"], steps=5, gpus=(1, 4), volume="claim", team="t")
    spec = read_training_job(made).spec
    assert (spec.pipeline.min_stages, spec.pipeline.max_stages, spec.entity) == (1, 4, "t")
    assert spec.checkpoint.path == "/checkpoints/a" and spec.is_script


def test_a_notebook_shows_jobs_as_a_table_whatever_they_hold():
    """Texts of users are texts there; statuses that no operator writes are no error."""
    hostile = "<script>alert(1)</script>"
    raw = {"metadata": {"namespace": "n", "name": "a"}, "spec": {"entity": hostile}}
    odd = {"metadata": {}, "status": {"progress": [1], "conditions": None, "allocation": "x", "restarts": 3}}
    html = Jobs((Job(raw), Job(odd)))._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert html.count("<tr>") == 3
    assert Job(odd).restarts == 0 and Job(odd).loss is None


def test_printed_jobs_are_a_line_each():
    """Their whole objects, with what the API server manages, would fill the screen."""
    job = Job({"metadata": {"namespace": "n", "name": "a", "managedFields": ["long"]}})
    assert repr(Jobs((job, job), more=True)).splitlines() == [*2 * ["n/a: New, step 0/0"], "and others"]
    assert f"{job!r}" == str(job) == "n/a: New, step 0/0"
    assert str(Jobs(())) == "no jobs"


def test_lines_of_several_pods_are_one_log_by_time(answers):
    """Each as it is; what has no time stays behind the line before it."""
    logs = {
        "a": [b"2026-01-01T00:00:00.5Z one", b"no time", b"2026-01-01T00:00:02Z four"],
        "b": [b"2026-01-01T00:00:00.25Z zero", b"2026-01-01T00:00:01.000000001Z \xff three"],
    }

    class Spoken(Connection):
        async def lines(self, path, query, *, silence=None):
            for line in logs[path.split("/")[-2]]:
                yield line

    def pod(name, rank):
        return Pod("n", name, name, launch=1, rank=rank, container="c", started=True)

    async def read():
        return [line.text async for line in merged(Spoken(None, 1), [pod("a", 0), pod("b", 1)], None)]

    assert asyncio.run(read()) == ["zero", "one", "no time", "\ufffd three", "four"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_pod_whose_trainer_waits_beside_another_container_hides_no_log(answers, follow):
    """That of a service mesh runs while the trainer's image is pulled; the kubelet refuses its log then."""

    def pod(rank, state):
        containers = [{"name": "mesh"}, {"name": "c", "env": [{"name": "BALLAST_POD_IP"}]}]
        statuses = [{"name": "mesh", "state": {"running": {}}}, {"name": "c", "state": state}]
        return {
            "metadata": {"namespace": "default", "name": f"p-{rank}", "uid": f"u-{rank}", "labels": {}},
            "spec": {"containers": containers},
            "status": {"phase": "Running", "containerStatuses": statuses},
        }

    pods = [pod(0, {"terminated": {}}), pod(1, {"waiting": {"reason": "ContainerCreating"}})]
    refusal = {"message": 'container "c" in pod "p-1" is waiting to start: ContainerCreating'}

    def answer(path):
        if "/log" in path:
            return (b"step 1\n", 200) if "/p-0/" in path else (json.dumps(refusal).encode(), 400)
        return json.dumps(
            {"items": pods} if "/pods" in path else {"status": {"state": "Failed"}}
        ).encode(), 200

    with Client(answers(answer)) as client:
        assert [line.text for line in client.logs("one", follow=follow)] == ["step 1"]


def test_a_closed_client_and_a_wrong_timeout_say_so(answers):
    """And a client that nobody closes ends with the program."""
    client = Client(answers(b"{}"))
    client.close()
    client.close()
    with pytest.raises(Exception, match="the client is closed"):
        client.list()

    async def wait():
        async with AsyncClient(answers(b"{}")) as other:
            await other.wait("a", timeout=float("nan"))

    with pytest.raises(Refused, match="nan is not a number of seconds"):
        asyncio.run(wait())


async def states(connection):
    """Of the job a, as a client with such a connection watches it."""
    client = AsyncClient()
    client.connection = connection(None, 1)
    return [job.state async for job in client.watch("a")]


@pytest.mark.parametrize(
    "line", [None, b'{"type": "ERROR"}', b"[1]", b"{}", b'{"type": "MODIFIED", "object": "x"}']
)
def test_watches_that_end_at_once_are_asked_for_ever_more_rarely(line, monkeypatch):
    """As a proxy ends them, or an API server that knows the version no more, or by what is no event."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    class Brief(Connection):
        async def request(self, verb, path, **_):
            state = "Running" if len(pauses) < 6 else "Succeeded"
            return {"metadata": {"resourceVersion": state}, "status": {"state": state}}

        async def lines(self, path, query, *, silence=None):
            if line is not None:
                yield line

    monkeypatch.setattr(aio, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(aio, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert asyncio.run(states(Brief)) == ["Running", "Succeeded"]
    assert pauses == [0.5, 1.5, 3.5, 7.5, 10, 10]


@pytest.mark.parametrize("error", [NotConnected, LoggedOut])
def test_an_outage_of_minutes_is_waited_out_and_an_expired_login_is_told(error, monkeypatch):
    """Once the API server has answered; before that, the address may be wrong."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    class Away(Connection):
        answers = iter(["Running", *[error("away")] * 30, "Succeeded"])

        async def request(self, verb, path, **_):
            found = next(self.answers)
            if isinstance(found, Exception):
                raise found
            return {"metadata": {"resourceVersion": found}, "status": {"state": found}}

        async def lines(self, path, query, *, silence=None):
            raise error("lost")
            yield b""

    monkeypatch.setattr(aio, "asyncio", SimpleNamespace(sleep=sleep))
    if error is LoggedOut:
        with pytest.raises(LoggedOut, match="away"):
            asyncio.run(states(Away))
    else:
        assert asyncio.run(states(Away)) == ["Running", "Succeeded"]
        assert len(pauses) == 31 and max(pauses) == 10
    Away.answers = iter([NotConnected("no such host")])
    with pytest.raises(NotConnected, match="no such host"):
        asyncio.run(states(Away))


def test_a_log_is_followed_through_lost_connections_and_outages(monkeypatch):
    """Also where nothing was written between two of them, as behind a proxy that ends what is idle."""
    monkeypatch.setattr("ballast.client.logs._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("ballast.client.logs._TOGETHER_SECONDS", 0.0)
    one, two, three = (f"2026-01-01T00:00:0{at}Z {at}".encode() for at in ("1", "1.5", "2"))
    reads = iter([[], [one, two], [], [one], [one, two, three, None]])
    asked = []
    pod = {
        "metadata": {"namespace": "n", "name": "p", "uid": "u", "labels": {}},
        # A service mesh may put its container before the trainer's.
        "spec": {"containers": [{"name": "mesh"}, {"name": "c", "env": [{"name": "BALLAST_POD_IP"}]}]},
        "status": {"phase": "Running"},
    }

    class Lossy(Connection):
        looks = 0

        async def request(self, verb, path, **_):
            self.looks += 1
            if self.looks % 2:
                raise NotConnected("away")
            return {"items": [pod]}

        async def lines(self, path, query, *, silence=None):
            assert query["container"] == "c"
            asked.append(query.get("sinceTime"))
            for line in next(reads):
                if line is None:
                    return
                yield line
            raise NotConnected("idle")

    async def read():
        connection = Lossy(None, 1)

        async def ended():
            return len(asked) == 5

        return [line.text async for line in Follower(connection, "n", "j", None).lines(ended, None)]

    assert asyncio.run(read()) == ["1", "1.5", "2"]
    assert asked == [None, None, *["2026-01-01T00:00:01.500000000Z"] * 3]


def test_importing_the_client_brings_no_operator():
    """Neither kopf nor solvers nor the operator: it runs in notebooks."""
    code = "import sys, ballast.client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {
        "kopf",
        "numpy",
        "scipy",
        "torch",
        "ballast_operator",
        "ballast_policies",
    }


class Paged(Connection):
    """5,000 jobs; a page of more than ``in_time`` of them does not come in time."""

    def __init__(self, in_time=500):
        super().__init__(None, 1)
        self.in_time, self.asked, self.read = in_time, [], 0

    async def request(self, verb, path, *, query=None, **_):
        first, limit = int(query.get("continue") or 0), int(query["limit"])
        self.asked.append(limit)
        if limit > self.in_time:
            raise NotConnected(f"no answer to {path} in 1 s") from TimeoutError()
        numbers = range(first, min(first + limit, 5000))
        self.read += len(numbers)
        more = str(first + limit) if first + limit < 5000 else ""
        items = [{"metadata": {"name": f"job-{number:04}"}} for number in numbers]
        return {"items": items, "metadata": {"continue": more}}


def listed(connection, **how):
    client = AsyncClient()
    client.connection = connection
    return asyncio.run(client.list(**how))


@pytest.mark.parametrize(
    ("how", "asked", "read"),
    [
        ({"limit": 500}, [500, 1], 501),
        ({"limit": 20}, [21], 21),
        ({"limit": 0}, [500] * 10, 5000),
        ({"limit": 20, "states": ("New",)}, [500], 500),
    ],
    ids=str,
)
def test_no_more_jobs_are_read_than_are_asked_for_and_one(how, asked, read):
    """By the last it is known whether there are others; where states are chosen, any page may have some."""
    connection = Paged()
    found = listed(connection, **how)
    assert (connection.asked, connection.read) == (asked, read)
    assert len(found) == (how["limit"] or 5000) and found.more == bool(how["limit"])


def test_where_a_page_does_not_come_in_time_smaller_ones_are_asked_for():
    """None is read twice, none is left out; where the smallest does not come either, that is told."""
    connection = Paged(in_time=100)
    found = listed(connection, limit=0)
    assert len({job.name for job in found}) == 5000 == connection.read
    assert connection.asked[:2] == [500, 125] and set(connection.asked[2:]) == {31}
    never = Paged(in_time=0)
    with pytest.raises(NotConnected, match="in 1 s"):
        listed(never)
    assert never.asked == [500, 125, 31, 25]
    few = Paged(in_time=0)
    with pytest.raises(NotConnected, match="in 1 s"):
        listed(few, limit=20)
    assert few.asked == [21]  # nothing smaller is to be had


def test_a_server_that_does_not_answer_is_told_with_what_to_do(tmp_path):
    """After how long, and that less could be asked for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = kubeconfig(tmp_path, silent.getsockname()[1])
        with Client(where, timeout=0.05) as client, pytest.raises(NotConnected) as caught:
            client.get("one")
    assert "no answer to /apis/" in str(caught.value)
    assert "in 0.05 s. To fix: check the connection; of a busy API server ask for less" in str(caught.value)
    with pytest.raises(ClickException, match=r"To fix: .* ask for less"), cluster_errors():
        raise Unreachable("list /apis: no answer in 10 s") from TimeoutError()


def test_a_bundle_says_where_it_has_not_everything(answers, tmp_path, monkeypatch):
    """Of a list with more objects than are kept, the first ones."""
    monkeypatch.setattr("ballast_operator.cli.live.bundle.MOST_ITEMS", 2)
    jobs = {"items": [{"metadata": {"namespace": "n", "name": f"job-{number}"}} for number in range(4)]}

    def said(path):
        if path == "/version":
            return b"{}", 200
        listed = path.startswith("/apis/ballast.dev/v1alpha1/trainingjobs")
        return (json.dumps(jobs).encode(), 200) if listed else (b"{}", 404)

    file = tmp_path / "b.tar.gz"
    done = CliRunner().invoke(main, ["support-bundle", "--file", str(file), "--kubeconfig", answers(said)])
    assert done.exit_code == 0, (done.output, done.exception)
    with tarfile.open(file) as archive:
        parts = {Path(part.name).name: archive.extractfile(part).read() for part in archive}
    assert len(json.loads(parts["trainingjobs.json"])) == 2
    assert parts["trainingjobs.error.txt"] == b"trainingjobs.json has the first 2 alone"
