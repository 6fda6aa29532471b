"""Plans for gangs of trainer processes on this machine."""

from collections.abc import Sequence

from ballast_policies.contract.messages import Rank
from ballast_policies.contract.plan import Directive, Plan

from tests.support.ports import own_addresses


def local_plan(
    pods: Sequence[str],
    *,
    epoch: int = 1,
    directive: Directive = Directive.RUN,
    network: int | None = None,
    ranks_per_pod: int = 1,
) -> Plan:
    """A plan whose pods each have a loopback address of their own, by their name's last number.

    Args:
        pods: names of the pods, in the order of their ranks.
        epoch: of the plan.
        directive: of the plan.
        network: 1 to 250, for pods that listen: gangs that run at the same time need different ones. The
            addresses are in a block that no other process of this machine has, so that tests run side by
            side. None: a plan that is only a value.
        ranks_per_pod: of each pod.
    """
    prefix = "127.1.1" if network is None else f"127.{own_addresses().block}.{network}"
    ranks = tuple(
        Rank(
            rank=number * ranks_per_pod + local_rank,
            pod=pod,
            local_rank=local_rank,
            address=f"{prefix}.{int(pod.rpartition('-')[2]) + 1}",
            gpu_type="v100",
        )
        for number, pod in enumerate(pods)
        for local_rank in range(ranks_per_pod)
    )
    return Plan(job="job", epoch=epoch, launch=1, directive=directive, ranks=ranks)
