"""What the API server tells kopf goes into the caches; kopf learns how far it has read."""

import json

import pytest
from aiohttp import ClientSession, web
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.feeding import feeding, watched_kind
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, NODE, POD
from yarl import URL

JOBS = "/apis/ballast.dev/v1alpha1/trainingjobs"


def job(name, version, **more):
    metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": JOB.api_version, "kind": JOB.kind, "metadata": metadata, "spec": {}, **more}


def line(event, item):
    return json.dumps({"type": event, "object": item}).encode() + b"\n"


async def answered(content, path, *, pieces=2**20, caches=None):
    """(caches, what kopf reads) of an API server that answers ``content``, in pieces of some size."""

    async def answer(request):
        if isinstance(content, dict):
            return web.json_response(content)
        stream = web.StreamResponse()
        await stream.prepare(request)
        for start in range(0, len(content), pieces):
            await stream.write(content[start : start + pieces])
        return stream

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    caches = Caches() if caches is None else caches
    url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    async with ClientSession(response_class=feeding(caches)) as session, session.get(url) as found:
        if isinstance(content, dict):
            read = await found.json()
        else:
            read = b"".join([part async for part in found.content.iter_chunked(2**20)])
    await runner.cleanup()
    return caches, read


@pytest.mark.parametrize("pieces", [7, 301, 2**20])
async def test_events_go_into_the_caches_and_kopf_reads_where_its_watch_is(pieces):
    """Torn anywhere; what is deleted is gone, and nothing of an object is left to kopf."""
    events = [
        ("ADDED", job("a", 3)),
        ("ADDED", job("b", 4)),
        ("MODIFIED", job("a", 5)),
        ("DELETED", job("b", 6)),
    ]
    text = b"".join(line(*event) for event in events)
    caches, read = await answered(text, f"{JOBS}?watch=true", pieces=pieces)
    assert [(item["metadata"]["name"], item["metadata"]["resourceVersion"]) for item in caches[JOB]] == [
        ("a", "5")
    ]
    told = [json.loads(text) for text in read.splitlines()]
    assert {event["type"] for event in told} == {"BOOKMARK"}
    assert told[-1]["object"]["metadata"] == {"resourceVersion": "6"}


async def test_a_job_that_the_caches_cannot_take_hides_no_other():
    """A listener that fails on one object has heard of the next."""
    heard = []

    def listener(kind, item):
        heard.append(item["metadata"]["name"])
        if item["metadata"]["name"] == "a":
            raise RuntimeError("not understood")

    caches = Caches()
    caches.store_listeners.append(lambda kind, old, new: listener(kind, new))
    text = line("ADDED", job("a", 3)) + line("ADDED", job("b", 4))
    await answered(text, f"{JOBS}?watch=true", caches=caches)
    assert heard == ["a", "b"]


async def test_bookmarks_and_errors_are_left_to_kopf_in_their_place_and_end_the_stream():
    """It lists afresh where its version is too old."""
    gone = {"kind": "Status", "metadata": {}, "code": 410}
    bookmark = {"kind": JOB.kind, "metadata": {"resourceVersion": "9"}}
    text = line("ADDED", job("a", 3)) + line("BOOKMARK", bookmark) + line("ERROR", gone) + b'{"torn'
    _, read = await answered(text, f"{JOBS}?watch=true")
    told = [json.loads(text) for text in read.splitlines()]
    assert [event["type"] for event in told] == ["BOOKMARK", "BOOKMARK", "ERROR"]
    assert told[1]["object"] == bookmark
    assert told[2]["object"]["code"] == 410


async def test_the_list_before_a_watch_goes_into_the_caches():
    """Kopf reads from which version to watch, and where the list continues."""
    metadata = {"resourceVersion": "8", "continue": "more"}
    items = [
        {part: value for part, value in job(name, 3).items() if part not in ("apiVersion", "kind")}
        for name in "ab"
    ]
    caches, read = await answered({"kind": "TrainingJobList", "metadata": metadata, "items": items}, JOBS)
    assert read == {"kind": "TrainingJobList", "metadata": metadata, "items": []}
    assert sorted((item["kind"], item["metadata"]["name"]) for item in caches[JOB]) == [
        ("TrainingJob", "a"),
        ("TrainingJob", "b"),
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (JOBS, JOB),
        ("/apis/ballast.dev/v1alpha1/namespaces/team/trainingjobs", JOB),
        ("/api/v1/pods", POD),
        ("/api/v1/nodes", NODE),
        ("/proxy/api/v1/namespaces/team/configmaps", CONFIG_MAP),
        ("/apis/metrics.k8s.io/v1beta1/pods", None),
        ("/api/v1/namespaces", None),
        ("/api/v1", None),
        ("/apis/ballast.dev/v1alpha1/namespaces/team/trainingjobs/pods", None),
    ],
)
def test_collections_of_watched_kinds_are_known_by_their_path(path, kind):
    """Also where the API server stands behind a path; other answers are read as they are."""
    assert watched_kind(URL(f"https://server{path}")) is kind
