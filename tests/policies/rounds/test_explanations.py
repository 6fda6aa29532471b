"""Why jobs wait: one text for those that ask for the same."""

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.draft import Explained, explain_waiting, pool_rooms
from ballast_policies.rounds.values import Node
from hypothesis import given
from hypothesis import strategies as st

NODES = (
    Node(name="a-0", pool="a", gpu_type="v100", gpus=4),
    Node(name="a-1", pool="a", gpu_type="v100", gpus=4, taints="team=x:NoSchedule"),
    Node(name="b-0", pool="b", gpu_type="k80", gpus=8),
)

JOBS = st.builds(
    Job,
    name=st.sampled_from(["one", "two", "three"]),
    gpus=st.integers(1, 3),
    throughput=st.dictionaries(st.sampled_from(["v100", "k80", "h100"]), st.sampled_from([0.0, 1.0, 2.0])),
)


@given(
    asked=st.lists(
        st.tuples(
            JOBS, st.sampled_from([frozenset(), frozenset({"team=x:NoSchedule"})]), st.sampled_from([1, 2])
        )
    ),
    free=st.fixed_dictionaries({node.name: st.integers(0, node.gpus) for node in NODES}),
    kept_for=st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["one", "two"])),
)
def test_a_text_found_for_another_job_is_the_job_s_own(asked, free, kept_for):
    """Whatever was asked before: also of the job for which a pool's free GPUs are kept."""
    rooms = pool_rooms(NODES, free)
    explained = Explained(rooms, kept_for)
    for job, not_tolerated, per_pod in asked:
        expected = explain_waiting(job, rooms, kept_for, not_tolerated, per_pod)
        assert explained.waiting(job, not_tolerated, per_pod).told(None) == expected
