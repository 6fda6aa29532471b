"""Whether a namespace exists: a list of objects in one that does not is empty, and no error."""

from ballast_operator.errors import NotFound, Rejected
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import NAMESPACE


async def is_missing(cluster: Cluster, namespace: str) -> bool:
    """Whether the API server does not know ``namespace``; False also where the account may not ask."""
    try:
        await cluster.get(NAMESPACE, "", namespace)
    except NotFound:
        return True
    except Rejected:
        return False
    return False


def missing(namespace: str) -> str:
    """The message for a user, with what to change."""
    return (
        f"there is no namespace {namespace}. To fix: kubectl create namespace {namespace}, or name another "
        "(kubectl get namespaces)"
    )
