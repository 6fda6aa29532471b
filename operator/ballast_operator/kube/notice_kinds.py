"""Marks by which the handlers of clouds say that a node is about to go, and how long it lasts then."""

import dataclasses

LEAVES_AT_ANNOTATION = "ballast.dev/leaves-at"
"""Of a node that has a notice: when it goes, RFC 3339."""

KARPENTER_ENDS_AT_ANNOTATION = "karpenter.sh/nodeclaim-termination-timestamp"
"""Of a node that Karpenter drains: when it ends the last pods by force, RFC 3339. It comes from
``terminationGracePeriod`` of the NodePool, and says nothing of when a cloud takes back a spot machine."""

LEAVES_AT_ANNOTATIONS = (LEAVES_AT_ANNOTATION, KARPENTER_ENDS_AT_ANNOTATION)
"""The first that can be read counts."""

AWS_SECONDS = 120.0
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""

GCP_SECONDS = 30.0
"""https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms#termination-grace-period"""

AZURE_SECONDS = 30.0
"""Preempt: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoticeKind:
    """A mark that a handler puts on a node that is about to go.

    Attributes:
        name: key of a taint, or type of a condition; one that ends with ``/`` stands for all that begin so.
        seconds: how long the node lasts from then on, where it does not state it.
        means: for people.
        reasons: of a condition: the reasons that say so, by their beginnings; empty: any.
    """

    name: str
    seconds: float
    means: str
    reasons: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Whether the taint's key or the condition's type is one of this kind."""
        return name.startswith(self.name) if self.name.endswith("/") else name == self.name


TAINTS = (
    NoticeKind(name="aws-node-termination-handler/", seconds=AWS_SECONDS, means="AWS takes the machine back"),
    NoticeKind(name="karpenter.sh/disrupted", seconds=AWS_SECONDS, means="Karpenter drains the node"),
    NoticeKind(name="karpenter.sh/disruption", seconds=AWS_SECONDS, means="Karpenter drains the node"),
    NoticeKind(
        name="cloud.google.com/impending-node-termination",
        seconds=GCP_SECONDS,
        means="Google Cloud takes the machine back",
    ),
    NoticeKind(name="aks-node-termination-handler/", seconds=AZURE_SECONDS, means="Azure evicts the machine"),
    NoticeKind(
        name="remediator.kubernetes.azure.com/unschedulable",
        seconds=AZURE_SECONDS,
        means="Azure drains the node",
    ),
    NoticeKind(
        name="ToBeDeletedByClusterAutoscaler",
        seconds=AWS_SECONDS,
        means="the autoscaler removes the node",
    ),
    NoticeKind(name="ballast.dev/leaving", seconds=AWS_SECONDS, means="somebody has said so"),
)
"""By key, whatever the effect."""

CONDITIONS = (
    NoticeKind(
        name="VMEventScheduled",
        seconds=AZURE_SECONDS,
        means="Azure has scheduled an event",
        reasons=("Preempt", "Terminate", "Redeploy", "Reboot"),
    ),
    NoticeKind(name="PreemptScheduled", seconds=AZURE_SECONDS, means="Azure evicts the machine"),
    NoticeKind(name="TerminateScheduled", seconds=AZURE_SECONDS, means="Azure deletes the machine"),
    NoticeKind(name="RedeployScheduled", seconds=AZURE_SECONDS, means="Azure moves the machine"),
    NoticeKind(name="RebootScheduled", seconds=AZURE_SECONDS, means="Azure restarts the machine"),
    NoticeKind(name="Terminating", seconds=AWS_SECONDS, means="the machine's provider takes it back"),
)
"""By type, where the status is True."""
