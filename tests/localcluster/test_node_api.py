"""What a node's agent makes of the API server's refusals and of gaps in its watches."""

import json

import pytest
from ballast_localcluster.nodes.api import Api, ApiError

AGENT = 'User "system:ballast:node-agent"'


@pytest.mark.parametrize(
    ("status", "message", "passing"),
    [
        (403, f'pods is forbidden: {AGENT} cannot list resource "pods" in API group ""', True),
        (403, 'pods "a" is forbidden: exceeded quota: q, requested: pods=1', False),
        (404, "not found", False),
        (409, "changed", False),
        (429, "too many requests", True),
        (504, "timed out", True),
    ],
)
def test_an_agent_tries_again_what_an_api_server_may_soon_allow(status, message, passing):
    """One that has just started answers 403 until it has read the roles: no reason to give a node up."""
    assert ApiError(status, message).is_passing is passing


async def test_objects_that_go_in_a_gap_of_the_watch_are_told_as_gone(tmp_path):
    """A version that is too old is the gap: the list after it lacks what was deleted meanwhile."""

    def item(name):
        return {"metadata": {"uid": f"uid-{name}", "name": name, "resourceVersion": "1"}}

    class Gapped(Api):
        lists = iter([["a", "b"], ["c"]])

        async def call_until_reached(self, method, path, body=None, **_):
            return {"metadata": {"resourceVersion": "1"}, "items": [item(name) for name in next(self.lists)]}

        async def _watch(self, path, query, version):
            yield {"type": "ADDED", "object": item("d")}
            yield {"type": "DELETED", "object": item("a")}
            yield {"type": "ERROR", "object": {}}

    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"server": "", "certificate-authority-data": ""}
    users = [{"user": {"token": ""}}]
    kubeconfig.write_text(json.dumps({"clusters": [{"cluster": cluster}], "users": users}))
    told = []
    async for there, found in Gapped(kubeconfig).follow("/", {}):
        told.append((there, found["metadata"]["name"]))
        if len(told) == 7:
            break
    assert told[:4] == [(True, "a"), (True, "b"), (True, "d"), (False, "a")]
    assert sorted(told[4:6]) == [(False, "b"), (False, "d")] and told[6] == (True, "c")
