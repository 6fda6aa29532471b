"""Watches, by kopf: every event goes into the caches as it is read (:mod:`.feeding`); nothing else happens.

kopf's other services are switched off: no finalizers, no annotations, no posted events, no peering.
"""

import asyncio
import contextlib
import uuid
from typing import Any

import aiohttp
import kopf

from ballast_operator.errors import NotFound, Rejected, Unavailable
from ballast_operator.kube.caches import SELECTORS, WATCHED, Caches
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.feeding import feeding
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, POD, Kind, key_of
from ballast_operator.kube.namespaces import is_missing
from ballast_operator.waits import WaitReason, Waits


def watch_registry(caches: Caches, cluster: Cluster) -> kopf.OperatorRegistry:
    """What kopf watches, over connections that feed ``caches``."""
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(cluster, feeding(caches))

    kopf.on.login(registry=registry)(login)
    for kind in WATCHED:
        _feed(registry, caches, kind)
    return registry


def _feed(registry: kopf.OperatorRegistry, caches: Caches, kind: Kind) -> None:
    version = kind.api_version.rpartition("/")[2]

    async def seen(event: Any, **_: Any) -> None:
        caches.watched(kind, event["type"], event["object"])  # what the connection did not know as an event

    kopf.on.event(kind.group, version, kind.plural, registry=registry, id=f"seen-{kind.plural}")(seen)


def watch_settings(*, request_seconds: float) -> kopf.OperatorSettings:
    """Kopf's settings: bounded streams, nothing written."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = request_seconds
    settings.networking.request_timeout = request_seconds
    settings.networking.connect_timeout = request_seconds
    settings.networking.error_backoffs = RETRY_PAUSES
    settings.scanning.disabled = True
    settings.queueing.exit_timeout = 0.2  # handlers only fill caches: nothing is lost
    settings.process.ultimate_exiting_timeout = 30
    settings.persistence.diffbase_storage = NoStates()
    # Kopf removes its own finalizer from every object that has it, so it is one that no user can know.
    settings.persistence.finalizer = f"ballast.dev/{uuid.uuid4()}"
    for kind, selector in SELECTORS.items():
        settings.watching.label_selectors[kind.plural] = selector
    return settings


FIRST_PAUSE_SECONDS = 1.0
"""Before lists that failed are tried again; doubles."""

LONGEST_PAUSE_SECONDS = 5.0
"""Between two tries to list everything."""


READ_SINGLY = (JOB, POD, CONFIG_MAP, LEASE)
"""Kinds of which the operator's account may read one object."""

MOST_READ_SINGLY = 100
"""Objects that are read one by one; of more, a whole list costs less."""


RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between kopf's tries of one request; :mod:`.feeding` sees to it that it begins anew afterwards."""


class NoStates(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Kopf's memory of what an object was: none, since no handler asks for differences.

    A copy of each object is not made, and what an annotation claims to be one is not read.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing is known."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


async def connection(cluster: Cluster, answers: type[aiohttp.ClientResponse]) -> kopf.AiohttpSession:
    """The connection that ``cluster`` uses, for kopf, which reads ``answers``."""
    configuration = cluster.configuration
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = header.rpartition(" ")
    info = kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        response_class=answers,
    )
    return kopf.AiohttpSession(server=info.server, aiohttp_session=session)


async def resync(caches: Caches, cluster: Cluster, namespace: str, waits: Waits) -> list[str]:
    """List everything once and bring the caches up to it; what a watch has lost is found here.

    Returns:
        Why the other kinds could not be listed.
    """
    errors = []
    for kind in WATCHED:
        where = namespace if kind.namespaced and kind.plural != "pods" else ""
        try:
            await _list(caches, cluster, kind, where)
        except NotFound as error:
            errors.append(str(error))
            waits.begin(
                WaitReason.DEFINITIONS,
                f"the API server does not know {kind.plural} of {kind.api_version}",
                to_fix="ballast crds | kubectl apply --server-side -f -, or install the Helm chart",
                subject=kind.plural,
            )
        except (Unavailable, Rejected) as error:
            errors.append(str(error))
        else:
            waits.end(WaitReason.DEFINITIONS, kind.plural)
    if namespace and not errors:
        await _look_for_namespace(cluster, namespace, waits)
    return errors


async def _list(caches: Caches, cluster: Cluster, kind: Kind, namespace: str) -> None:
    """Of many objects that are mostly known, the metadata, and those that the caches lack."""
    where = {"namespace": namespace, "label_selector": SELECTORS.get(kind, "")}
    store = caches[kind]
    if kind in READ_SINGLY and len(store) > MOST_READ_SINGLY:
        present, version = await cluster.list_metadata(kind, **where)
        caches.doubt(kind, present, version)
        lacking = [key_of(item) for item in present if store.lacks(item)]
        if len(lacking) <= MOST_READ_SINGLY:
            items = []
            for key in lacking:
                with contextlib.suppress(NotFound):  # deleted since
                    items.append(await cluster.get(kind, *key))
            caches.listed(kind, items, version, present=present)
            return
    items, version = await cluster.list(kind, **where)
    caches.doubt(kind, items, version)
    caches.listed(kind, items, version)


async def _look_for_namespace(cluster: Cluster, namespace: str, waits: Waits) -> None:
    """Without it every list is empty, and no error."""
    try:
        if not await is_missing(cluster, namespace):
            waits.end(WaitReason.NAMESPACE, namespace)
            return
    except Unavailable:
        return
    waits.begin(
        WaitReason.NAMESPACE,
        f"the namespace {namespace} of the jobs does not exist",
        to_fix=f"kubectl create namespace {namespace}, or start the operator with another --namespace",
        subject=namespace,
    )


async def list_until_complete(
    caches: Caches, cluster: Cluster, namespace: str, waits: Waits, *, what: str
) -> None:
    """:func:`resync` until every kind has been listed; ``what``: is waited for, as a sentence."""
    waits.begin(WaitReason.CACHES, what)
    pause = FIRST_PAUSE_SECONDS
    while errors := await resync(caches, cluster, namespace, waits):
        waits.begin(WaitReason.CACHES, f"{what}; not listed yet: {'; '.join(errors)}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    waits.end(WaitReason.CACHES)
