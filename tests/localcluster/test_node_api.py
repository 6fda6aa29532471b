"""What a node's agent makes of the API server's refusals."""

import pytest
from ballast_localcluster.nodes.api import ApiError

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
