"""The channel through the Kubernetes API: the job's ConfigMap ``<job>-plan`` and Lease ``<job>``.

The ConfigMap is watched, the Lease is patched.
"""

import datetime
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import (
    ACK_ANNOTATION,
    CONFIG_KEY,
    END_REASON_ANNOTATION,
    FINISHED_ANNOTATION,
    PLAN_KEY,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Plan,
    lease_name,
    plan_config_map_name,
)

from ballast_trainer.channel.api_server import ApiServer
from ballast_trainer.channel.base import ChannelError, Messages, config_from, plan_from
from ballast_trainer.channel.watched_object import WatchedObject


class KubernetesChannel:
    """See :class:`~ballast_trainer.channel.base.Channel`."""

    def __init__(self, api: ApiServer, *, namespace: str, job: str, pod: str) -> None:
        self._api = api
        self._config_map = WatchedObject(
            api, f"/api/v1/namespaces/{namespace}/configmaps", plan_config_map_name(job)
        )
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease_name(job)}"
        self._pod = pod

    def read_plan(self) -> Plan | None:
        """``plan.json`` of the ConfigMap."""
        return plan_from(self._data().get(PLAN_KEY), self._config_map.path)

    def read_config(self) -> Mapping[str, Any] | None:
        """``config.json`` of the ConfigMap."""
        return config_from(self._data().get(CONFIG_KEY), self._config_map.path)

    def write(self, messages: Messages) -> None:
        """One patch of the Lease: annotations, holder and renewal time."""
        texts = {
            REPORT_ANNOTATION: messages.report,
            PROPOSAL_ANNOTATION: messages.proposal,
            ACK_ANNOTATION: messages.ack,
        }
        annotations = {key: message.to_json() for key, message in texts.items() if message is not None}
        if messages.finished_step is not None:
            annotations[FINISHED_ANNOTATION] = str(messages.finished_step)
        if messages.end_reason is not None:
            annotations[END_REASON_ANNOTATION] = messages.end_reason
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        body = {
            "metadata": {"annotations": annotations},
            # A merge patch with None takes the holder away.
            "spec": {"holderIdentity": None if messages.closing else self._pod, "renewTime": now},
        }
        if self._api.request("PATCH", self._lease, body) is None:
            raise ChannelError(f"{self._lease} does not exist")

    def close(self) -> None:
        """End the watch."""
        self._config_map.close()

    def _data(self) -> Mapping[str, str]:
        config_map = self._config_map.newest()
        data: Mapping[str, str] = (config_map or {}).get("data") or {}
        return data
