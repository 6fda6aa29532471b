"""What the allocator knows of gangs on one node and on several, through reports, kinds and a restart."""

import dataclasses

import pytest
from ballast_operator.allocator.decider import record
from ballast_operator.allocator.saved_state import SavedState, decode, encode
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling.gang_speeds import GangRequest
from ballast_policies.scheduling.measurements import NOT_SEEN, Measurements
from ballast_policies.scheduling.state import NodeSizes
from ballast_policies.throughput.speeds import SpeedKey

from tests.operator.allocator.problem.test_throughput import a_report, config
from tests.operator.views.builders import a_spec

LARGE = NodeSizes.of([Node(name=f"n{i}", pool="v100", gpu_type="v100", gpus=8) for i in range(4)])
SMALL = NodeSizes.of([Node(name=f"n{i}", pool="v100", gpu_type="v100", gpus=1) for i in range(8)])


def report(measurements, job, spec, *, rate, nodes, steps=20):
    """Four ranks of ``job`` on ``nodes`` nodes report ``rate`` steps/s."""
    for step in range(steps):
        view = a_report(job, spec, rate=rate, step=step + 100 * nodes, stages=4)
        placed = view.status.allocation.replace(nodes=tuple(f"n{i % nodes}" for i in range(4)))
        record(dataclasses.replace(view, status=view.status.replace(allocation=placed)), measurements)


def estimate(measurements, job, spec, nodes=LARGE):
    request = GangRequest(key=("team", job), spec=spec, gpus=4, nodes=nodes)
    return measurements.estimates([request], ("v100",))["team", job]["v100"]


def a_kind(model="gpt", **changes):
    return a_spec(config=config(model), **changes)


def test_a_gang_on_the_last_large_node_keeps_its_own_speed_when_only_small_ones_are_left():
    """The node is cordoned: the type's speed is that on four nodes, the gang's is what it reports."""
    measurements, spec = Measurements(), a_kind()
    report(measurements, "a", spec, rate=1.0, nodes=4)
    report(measurements, "a", spec, rate=5.0, nodes=1)
    request = GangRequest(key=("team", "a"), spec=spec, gpus=4, nodes=SMALL)
    packed = estimate(measurements, "a", spec, SMALL).steps_per_second
    assert packed == pytest.approx(1.0)
    assert measurements.speed_on(request, "v100", 4, 1, packed) == pytest.approx(5.0, rel=1e-3)


def test_both_speeds_outlive_the_operator():
    """The saved state has the number of nodes with each speed."""
    measurements, spec = Measurements(), a_kind()
    report(measurements, "a", spec, rate=6.0, nodes=1)
    report(measurements, "a", spec, rate=2.0, nodes=3)
    saved = decode(encode(SavedState(jobs=measurements.jobs, kinds=measurements.kinds)))
    restored = Measurements()
    restored.restore(saved.jobs, saved.kinds)
    names = set(map(str, restored.reported_by(("team", "a"))))
    assert names == {"v100", "v100 over 3 nodes"}
    assert estimate(restored, "a", spec).steps_per_second == pytest.approx(6.0, rel=1e-3)


def test_the_fewest_nodes_are_counted_in_whole_pods_on_nodes_that_the_job_may_use():
    """Two pods of four fit one node of eight, none fits a node of two, and barred nodes do not count."""
    nodes = NodeSizes.of(
        [
            Node(name="a", pool="p", gpu_type="v100", gpus=8, taints="x"),
            Node(name="b", pool="p", gpu_type="v100", gpus=6),
            Node(name="c", pool="p", gpu_type="v100", gpus=6),
            Node(name="d", pool="p", gpu_type="v100", gpus=2),
            Node(name="e", pool="p", gpu_type="v100", gpus=16, closed="cordoned"),
            Node(name="f", pool="q", gpu_type="v100", gpus=4),
        ]
    )
    assert nodes.fewest("v100", 8) == 1
    assert nodes.fewest("v100", 8, barred=frozenset({"x"})) == 2
    assert nodes.fewest("v100", 8, per_pod=4, barred=frozenset({"x"})) == 2
    assert nodes.in_pool("q", 4) == 1
    assert (nodes.in_pool("q", 5), nodes.fewest("k80", 1)) == (None, None)


def test_each_job_of_a_decision_has_the_speeds_by_size_that_it_has_alone():
    """They are worked out once for all that are alike in what these depend on, not for others of the kind."""
    large = Node(name="a", pool="p", gpu_type="v100", gpus=8, taints="x")
    small = [Node(name=f"b{i}", pool="p", gpu_type="v100", gpus=3) for i in range(3)]
    nodes, barred, sizes = NodeSizes.of([large, *small]), frozenset({"x"}), (2, 4, 6)
    plain = config()
    changes = ({}, {"data": 2}, {"tensor": 2, "gpus_per_pod": 1}, {"gpus_per_pod": 2})
    specs = [a_spec(config=plain.replace(parallelism=plain.parallelism.replace(**each))) for each in changes]
    spec, *_, in_pairs = specs
    stated = a_spec(config=plain, throughput={"v100": {2: 1.0, 6: 1.1}})
    assert {each.kind for each in (*specs, stated)} == {spec.kind}
    asked = [
        *((each, 2, frozenset(), sizes) for each in (*specs, stated)),
        *((each, 2, barred, sizes) for each in (spec, in_pairs)),
        *((spec, 4, frozenset(), each) for each in (sizes, (2, 4))),
    ]
    rates = {(2, 1): 2.0, (4, 1): 3.8, (4, 2): 2.5, (6, 1): 5.5, (6, 2): 4.0, (6, 3): 3.0}
    reported = {SpeedKey.of("v100", *at): NOT_SEEN.measured(rate) for at, rate in rates.items()}

    def known() -> Measurements:
        found = Measurements()
        found.restore({}, {spec.kind: reported})
        return found

    requests = [
        GangRequest(key=("team", str(n)), spec=each, gpus=gpus, nodes=nodes, barred=without)
        for n, (each, gpus, without, _) in enumerate(asked)
    ]
    measurements = known()
    base = measurements.estimates(requests, ("v100", "k80"))
    for request, (*_, wanted) in zip(requests, asked, strict=True):
        found = measurements.by_size(request, base[request.key], wanted)
        for gpu_type, speed in base[request.key].items():
            alone = known().by_size(request, {gpu_type: speed}, wanted)
            assert found[gpu_type] == alone[gpu_type]


def stated_spread(job="a", nodes=LARGE, **options):
    """Four V100s: 4 steps/s on one node, 3 over two, 1 over four; and the request as its nodes have it."""
    spec = a_kind(throughput={"v100": {4: 4.0}}, spread={("v100", 4): {1: 4.0, 2: 3.0, 4: 1.0}}, **options)
    return spec, GangRequest(key=("team", job), spec=spec, gpus=4, nodes=nodes).on_its_nodes


def test_what_a_spec_works_out_is_worked_out_once_for_the_nodes_that_there_are():
    """Decisions of thousands of jobs ask anew; where nodes have become others, the speeds are others."""
    spec, first = stated_spread()
    small = NodeSizes.of([Node(name=f"n{i}", pool="v100", gpu_type="v100", gpus=2) for i in range(8)])
    on = [dataclasses.replace(first, spec=spec, nodes=nodes).on_its_nodes for nodes in (LARGE, small, LARGE)]
    assert on[2].spec is on[0].spec is first.spec
    assert [one.spec.throughput["v100"][4] for one in on] == [4.0, 3.0, 4.0]


def test_a_stated_speed_on_more_nodes_is_that_of_the_gang_there():
    """On three nodes between two and four; eight ranks lose as much as the four of which it is stated."""
    measurements, (_, request) = Measurements(), stated_spread()
    on = [measurements.speed_on(request, "v100", 4, nodes, 4.0) for nodes in (1, 2, 4)]
    assert on == pytest.approx([4.0, 3.0, 1.0])
    assert 1.0 < measurements.speed_on(request, "v100", 4, 3, 4.0) < 3.0
    assert measurements.speed_on(request, "v100", 8, 2, 6.0) == pytest.approx(4.5)


@pytest.mark.parametrize(("gpus_of_a_node", "speed"), [(8, 4.0), (2, 3.0), (1, 1.0)])
def test_policies_see_the_stated_speed_on_as_many_nodes_as_hold_the_gang(gpus_of_a_node, speed):
    """One table for clusters of large and of small nodes."""
    nodes = [Node(name=f"n{i}", pool="v100", gpu_type="v100", gpus=gpus_of_a_node) for i in range(8)]
    _, request = stated_spread(nodes=NodeSizes.of(nodes))
    found = Measurements().estimates([request], ("v100",))["team", "a"]["v100"]
    assert found.steps_per_second == pytest.approx(speed)


def test_reports_scale_a_stated_speed_on_other_nodes_and_replace_it_where_they_were_made():
    """Half as fast as stated on one node: half on two, until it was there."""
    measurements, (spec, request) = Measurements(), stated_spread()
    report(measurements, "a", spec, rate=2.0, nodes=1)
    packed = measurements.estimates([request], ("v100",))["team", "a"]["v100"].steps_per_second
    assert measurements.speed_on(request, "v100", 4, 2, packed) == pytest.approx(1.5, rel=1e-2)
    report(measurements, "a", spec, rate=0.5, nodes=2)
    assert measurements.speed_on(request, "v100", 4, 2, packed) == pytest.approx(0.5, rel=1e-2)


def test_a_job_that_has_run_on_more_nodes_only_is_as_much_faster_on_fewer_as_is_stated():
    """Two steps a second over four nodes, of which one was stated: eight on one."""
    measurements, (spec, request) = Measurements(), stated_spread()
    report(measurements, "a", spec, rate=2.0, nodes=4)
    found = measurements.estimates([request], ("v100",))["team", "a"]["v100"].steps_per_second
    assert found == pytest.approx(8.0, rel=1e-2)
