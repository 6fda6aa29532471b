"""The channel through the Kubernetes API: the job's ConfigMap ``<job>-plan`` and Lease ``<job>``.

The Lease is patched, the ConfigMap is watched: reading it costs no request while the watch runs, so a
thousand jobs that look twice a second cost the API server their open connections. A watch that has ended, is
refused, or has told something else than the object shows is replaced; until the next one runs, every read is
a request.
"""

import logging
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from ballast_client.api_server import ApiServer, ChannelError
from ballast_client.channels import Kubernetes
from ballast_policies.contract.messages import plan_config_map_name

logger = logging.getLogger(__name__)

CHECK_SECONDS = 15.0
"""The object is read this often beside a watch: a watch can be silent, and its connection seem open."""
WATCH_SECONDS = 300
"""Seconds after which the server ends a watch; it is opened again: connections spread over its replicas."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
"""Pauses between watches of which the first told nothing: it is refused, or the server ends it at once."""


class WatchedObject:
    """The newest state of the object at ``path``."""

    def __init__(
        self, api: ApiServer, collection: str, name: str, *, clock: Callable[[], float] = monotonic
    ) -> None:
        """Prepare; ``collection`` is the path of the objects of its kind in its namespace."""
        self.path = f"{collection}/{name}"
        self._api, self._clock = api, clock
        # The right to watch is for this name alone.
        self._query = (
            f"{collection}?watch=1&fieldSelector=metadata.name%3D{name}&timeoutSeconds={WATCH_SECONDS}"
        )
        self._lock = threading.Lock()
        self._item: Mapping[str, Any] | None = None
        self._number = 0
        """Number of the newest watch: what older ones tell is not heard."""
        self._live = False
        self._end: Callable[[], None] | None = None
        self._check_at = self._watch_at = float("-inf")
        self._pause = 0.0

    def newest(self) -> Mapping[str, Any] | None:
        """The object; None where there is none. Raises ChannelError: it has to be read, and cannot be."""
        now = self._clock()
        with self._lock:
            if self._live and now < self._check_at:
                return self._item
        item = self._api.request("GET", self.path)
        with self._lock:
            self._check_at = now + CHECK_SECONDS
            behind = self._live and _version(item) != _version(self._item)
            self._item = item
            if behind:
                logger.warning("the watch of %s was behind: watching again", self.path)
            if behind or (not self._live and now >= self._watch_at):
                self._watch(_version(item), now)
        return item

    @property
    def live(self) -> bool:
        """True if a watch runs."""
        with self._lock:
            return self._live

    def close(self) -> None:
        """End the watch; a later read begins another one."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._number += 1
        self._live = False
        if self._end is not None:
            self._end()
            self._end = None

    def _watch(self, version: str, now: float) -> None:
        """Replace the watch; under the lock."""
        self._stop()
        self._pause = min(max(_FIRST_PAUSE_SECONDS, 2 * self._pause), _LONGEST_PAUSE_SECONDS)
        self._watch_at = now + self._pause
        arguments = (self._number, version)
        threading.Thread(target=self._run, args=arguments, name="watch", daemon=True).start()

    def _run(self, number: int, version: str) -> None:
        path = f"{self._query}&resourceVersion={urllib.parse.quote(version)}" if version else self._query

        def opened(end: Callable[[], None]) -> None:
            with self._lock:
                if self._number == number:
                    self._live, self._end = True, end
                else:
                    end()

        try:
            for event in self._api.watch(path, seconds=WATCH_SECONDS + CHECK_SECONDS, opened=opened):
                if not self._heard(number, event):
                    break
        except ChannelError as error:
            logger.debug("watch: %s", error)
        finally:
            with self._lock:
                if self._number == number:
                    self._live, self._end = False, None

    def _heard(self, number: int, event: Mapping[str, Any]) -> bool:
        """Take over what an event tells; False: the watch is over."""
        kind, item = event.get("type"), event.get("object")
        if kind not in ("ADDED", "MODIFIED", "DELETED") or not isinstance(item, dict):
            # ERROR: its version is too old (410), or the server gives up.
            return False
        with self._lock:
            if self._number != number:
                return False
            self._item = None if kind == "DELETED" else item
            self._pause, self._watch_at = 0.0, float("-inf")
            return True


def _version(item: Mapping[str, Any] | None) -> str:
    return str(((item or {}).get("metadata") or {}).get("resourceVersion") or "")


class WatchingKubernetes(Kubernetes):
    """The job's objects, of which the ConfigMap is watched."""

    def __init__(self, api: ApiServer, *, namespace: str, job: str, pod: str) -> None:
        super().__init__(api, namespace=namespace, job=job, pod=pod)
        collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._watched = WatchedObject(api, collection, plan_config_map_name(job))

    def newest(self) -> Mapping[str, Any] | None:
        """The ConfigMap, as the watch tells."""
        return self._watched.newest()

    def close(self) -> None:
        """End the watch."""
        self._watched.close()
