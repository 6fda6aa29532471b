"""Jobs whose pod template is malformed."""

from tests.operator.api.objects import REMOVED, Malformed

TEMPLATES: list[Malformed] = [
    ("no template", "spec.template", REMOVED, "spec.template", "required"),
    ("no containers", "spec.template.spec.containers", [], "spec.template.spec.containers", "at least 1"),
    (
        "a container without a name",
        "spec.template.spec.containers",
        [{"image": "trainer:1"}],
        "spec.template.spec.containers[0].name",
        "required",
    ),
    (
        "pods that restart by themselves",
        "spec.template.spec.restartPolicy",
        "Always",
        "spec.template.spec.restartPolicy",
        "Never",
    ),
    ("a node chosen by the user", "spec.template.spec.nodeName", "n1", "spec.template.spec.nodeName", "node"),
    (
        "a service account chosen by the user",
        "spec.template.spec.serviceAccountName",
        "root",
        "spec.template.spec.serviceAccountName",
        "own service account",
    ),
    (
        "pods that end by themselves",
        "spec.template.spec.activeDeadlineSeconds",
        2,
        "spec.template.spec.activeDeadlineSeconds",
        "one by one",
    ),
    (
        "a variable without a name",
        "spec.template.spec.containers",
        [{"name": "trainer", "env": [{"value": "x"}]}],
        "spec.template.spec.containers[0].env[0].name",
        "required",
    ),
    (
        "an environment as text",
        "spec.template.spec.containers",
        [{"name": "trainer", "env": "A=b"}],
        "spec.template.spec.containers[0].env",
        "must be of type array",
    ),
    (
        "resources as text",
        "spec.template.spec.containers",
        [{"name": "trainer", "resources": "lots"}],
        "spec.template.spec.containers[0].resources",
        "must be of type object",
    ),
    (
        "requests as a list",
        "spec.template.spec.containers",
        [{"name": "trainer", "resources": {"requests": ["cpu"]}}],
        "spec.template.spec.containers[0].resources.requests",
        "must be of type object",
    ),
    (
        "an affinity as a list",
        "spec.template.spec.affinity",
        [1],
        "spec.template.spec.affinity",
        "must be of type object",
    ),
    (
        "terms as text",
        "spec.template.spec.affinity",
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": "abc"}}},
        "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        ".nodeSelectorTerms",
        "must be of type array",
    ),
    (
        "a grace period as text",
        "spec.template.spec.terminationGracePeriodSeconds",
        "abc",
        "spec.template.spec.terminationGracePeriodSeconds",
        "must be of type integer",
    ),
    (
        "tolerations as text",
        "spec.template.spec.tolerations",
        ["all"],
        "spec.template.spec.tolerations[0]",
        "must be of type object",
    ),
]
