"""The environment of the pods of a job without a model: their place in the gang, as torchrun states it.

Rank 0 hears its own address from its pod. The others refer to a ConfigMap, which the operator writes once
rank 0 has an address: until then the kubelet waits with their start, their images pulled.
"""

from typing import Any

from ballast_policies.contract import RENDEZVOUS_PORT, rendezvous_config_map_name, rendezvous_key

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.desired.owned import owned
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


def rendezvous_object(view: JobView, allocation: JobAllocation, address: str) -> dict[str, Any]:
    """The ConfigMap with the address of rank 0 of this launch."""
    data = {rendezvous_key(allocation.launch): address}
    return owned(view, CONFIG_MAP, rendezvous_config_map_name(view.name), data=data)


def script_environment(
    view: JobView, spec: JobSpec, allocation: JobAllocation, *, pod: int, save_seconds: float
) -> list[dict[str, Any]]:
    """Variables of the pod with this number: torchrun's, and what the client library reads.

    ``PET_*`` are torchrun's own options: a pod of several GPUs runs ``torchrun``, which starts one process
    for each and sets the ranks; with one GPU a pod both forms work.

    Args:
        view: the job.
        spec: of the job.
        allocation: of the launch.
        pod: number of the pod at launch.
        save_seconds: from the order to save and stop until the pods are deleted.
    """
    each, pods = allocation.gpus_per_pod, len(allocation.pods)
    found: dict[str, Any] = {
        "PET_NNODES": pods,
        "PET_NPROC_PER_NODE": each,
        "PET_NODE_RANK": pod,
        "PET_MASTER_PORT": RENDEZVOUS_PORT,
        "WORLD_SIZE": pods * each,
        "GROUP_RANK": pod,
        "GROUP_WORLD_SIZE": pods,
        "LOCAL_WORLD_SIZE": each,
        "MASTER_PORT": RENDEZVOUS_PORT,
        "BALLAST_SAVE_SECONDS": f"{save_seconds:g}",
        "BALLAST_TOTAL_STEPS": spec.config.total_steps,
        "BALLAST_CHECKPOINT_EVERY_STEPS": spec.config.checkpoint.steps,
        "BALLAST_CHECKPOINT_KEEP": spec.config.checkpoint.keep,
    }
    if each == 1:
        found |= {"RANK": pod, "LOCAL_RANK": 0}
    if pod == 0:
        source: dict[str, Any] = {"fieldRef": {"fieldPath": "status.podIP"}}
    else:
        name = rendezvous_config_map_name(view.name)
        source = {"configMapKeyRef": {"name": name, "key": rendezvous_key(allocation.launch)}}
    return [
        {"name": "MASTER_ADDR", "valueFrom": source},
        {"name": "PET_MASTER_ADDR", "value": "$(MASTER_ADDR)"},
        *({"name": name, "value": str(value)} for name, value in found.items()),
    ]
