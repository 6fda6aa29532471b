"""The gang for which a speed is asked, and how what its job has reported stands to what it states."""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.scheduling.node_sizes import NodeSizes
from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.problem.size_speeds import stated
from ballast_operator.kube.kinds import Key
from ballast_operator.views.spec import JobSpec

NO_NODES = NodeSizes()
"""Nothing is known of the nodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """A job, and the gang for which its speed is asked.

    Attributes:
        key: which job.
        spec: of the job.
        stages: GPUs of the gang.
        nodes: of the pools; empty: not known.
        barred: groups of nodes (``Node.group``) on which it must not be started.
    """

    key: Key
    spec: JobSpec
    stages: int
    nodes: NodeSizes = NO_NODES
    barred: frozenset[str] = frozenset()

    def fewest_nodes(self, gpu_type: str, gpus: int) -> int | None:
        """Nodes on which a gang of ``gpus`` is as close together as pools allow; None: unknown."""
        per_pod = self.spec.gpus_per_pod
        return self.nodes.fewest(gpu_type, gpus, per_pod=per_pod, barred=self.barred)


def reconcile_with_spec(job: GangRequest, reports: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """GPU type -> reports; where they bear out how the spec says that types compare, exactly so.

    A window with a pause in it would otherwise change who gets which GPU. Beyond PRIOR_DEVIATION the
    reports count as they are.
    """
    said = {gpu_type: stated(job.spec, gpu_type, job.stages) for gpu_type in reports}
    expected = {t: s.steps_per_second for t, s in said.items() if s is not None and s.steps_per_second > 0}
    ratios = {t: math.log(reports[t].steps_per_second / rate) for t, rate in expected.items()}
    scale = sum(ratios.values()) / len(ratios) if ratios else 0.0
    if any(abs(ratio - scale) > PRIOR_DEVIATION for ratio in ratios.values()):
        return dict(reports)
    borne_out = {
        t: dataclasses.replace(reports[t], steps_per_second=rate * math.exp(scale))
        for t, rate in expected.items()
    }
    return {**reports, **borne_out}


def as_prior(estimate: Estimate) -> Estimate:
    """What other jobs of the kind have reported, as a job takes it before it reports itself."""
    return Estimate(
        steps_per_second=estimate.steps_per_second,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )
