"""The security context of trainer pods: the profile `restricted`, field by field, unless overridden."""

import copy

import pytest
from ballast_operator.desired.pod import TRAINER_GROUP, restricted
from hypothesis import given
from hypothesis import strategies as st

TRAINER = {"name": "trainer", "image": "trainer:1"}


def contexts(**spec):
    """(the pod's context, the first container's)."""
    spec = restricted({"containers": [TRAINER], **spec})
    return spec["securityContext"], spec["containers"][0]["securityContext"]


def test_a_template_without_security_context_gets_the_restricted_profile():
    """Another user than root, the runtime's seccomp profile, no capability, no way to gain one."""
    pod, container = contexts()
    assert pod["runAsNonRoot"] is True and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["fsGroup"] == TRAINER_GROUP
    assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_every_container_gets_it():
    """Side cars and init containers, too."""
    spec = restricted({"containers": [TRAINER, {"name": "logs"}], "initContainers": [{"name": "fetch"}]})
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_template_overrides_one_field_and_keeps_the_others():
    """A group of its own for the volume, a capability for RDMA."""
    own = {**TRAINER, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 1000}}
    pod, container = contexts(securityContext={"fsGroup": 2000}, containers=[own])
    assert pod["fsGroup"] == 2000 and pod["runAsNonRoot"] is True
    assert container["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["runAsUser"] == 1000 and container["allowPrivilegeEscalation"] is False


def test_a_template_that_names_root_runs_as_root():
    """`runAsUser: 0` beside `runAsNonRoot: true` would never start."""
    pod, _ = contexts(securityContext={"runAsUser": 0})
    assert pod["runAsNonRoot"] is False
    _, container = contexts(containers=[{**TRAINER, "securityContext": {"runAsUser": 0}}])
    assert container["runAsNonRoot"] is False


@pytest.mark.parametrize("context", [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}])
def test_a_privileged_container_is_not_contradicted(context):
    """The API server refuses `allowPrivilegeEscalation: false` beside it."""
    _, container = contexts(containers=[{**TRAINER, "securityContext": context}])
    assert "allowPrivilegeEscalation" not in container


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(
    context=anything,
    container=st.fixed_dictionaries(
        {},
        optional={
            "securityContext": anything
            | st.fixed_dictionaries({"capabilities": anything | st.fixed_dictionaries({"add": anything})})
        },
    ),
    containers=anything,
)
def test_fields_of_a_wrong_type_are_left_to_the_api_server(context, container, containers):
    """No template makes the builder fail, and the template is not changed."""
    for spec in ({"securityContext": context, "containers": [container]}, {"initContainers": containers}):
        before = copy.deepcopy(spec)
        restricted(spec)
        assert spec == before
