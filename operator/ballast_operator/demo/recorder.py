"""Recorder of the API server's watch events.

One thread per watched kind; each event goes through one lock into the :class:`Story`, so that the
order within a kind is the API server's.  A watch that ends is opened again from a fresh list.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ballast_policies.contract import JOB_LABEL
from kubernetes import client, watch

from ballast_operator.demo.story import Story

WATCH_SECONDS = 300
"""After this long the API server ends a watch; it is opened again at once."""

POOL_LABEL = "ballast.dev/pool"
"""On nodes: the name of their pool. Written with the nodes; read for display only."""


class Recorder:
    """Follows one namespace from now on; use as a context manager.

    Attributes:
        story: the events so far; read it under :attr:`lock`.
        lock: held while an event is taken in.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.story = Story()
        self.lock = threading.Lock()
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._coordination = client.CoordinationV1Api(api)
        self._api = api
        self._namespace = namespace
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def now(self) -> float:
        """Seconds since the recorder was made."""
        return time.monotonic() - self._began

    def __enter__(self) -> "Recorder":
        for node in self._core.list_node().items:
            self.story.see_node(self._api.sanitize_for_serialization(node), POOL_LABEL)
        self._follow(self._core.list_namespaced_pod, self._see_pod, label_selector=JOB_LABEL)
        self._follow(self._coordination.list_namespaced_lease, self._see_lease)
        self._follow(
            self._custom.list_namespaced_custom_object,
            self._see_job,
            group="ballast.dev",
            version="v1alpha1",
            plural="trainingjobs",
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()

    def _follow(self, lister: Callable[..., Any], see: Callable[[str, Any], None], **where: str) -> None:
        def loop() -> None:
            while not self._stopped.is_set():
                try:
                    for event in watch.Watch().stream(
                        lister, namespace=self._namespace, timeout_seconds=WATCH_SECONDS, **where
                    ):
                        with self.lock:
                            see(event["type"], self._api.sanitize_for_serialization(event["object"]))
                        if self._stopped.is_set():
                            return
                except Exception as error:  # the API server restarts, a watch breaks: note it, list again
                    if self._stopped.is_set():
                        return
                    with self.lock:
                        self.story.narration.append((self.now, f"watch broke ({error}); opening it again"))
                    self._stopped.wait(1.0)

        thread = threading.Thread(target=loop, daemon=True, name=f"watch-{see.__name__}")
        thread.start()
        self._threads.append(thread)

    def _see_pod(self, kind: str, pod: Any) -> None:
        self.story.see_pod(self.now, pod, deleted=kind == "DELETED", job_label=JOB_LABEL)

    def _see_lease(self, kind: str, lease: Any) -> None:
        if kind != "DELETED":
            self.story.see_lease(self.now, lease)

    def _see_job(self, kind: str, job: Any) -> None:
        if kind != "DELETED":
            self.story.see_job(self.now, job)
