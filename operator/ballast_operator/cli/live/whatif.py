"""``ballast whatif``: another policy, more GPUs, other prices, for the jobs of a live cluster."""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.laboratory import from_lab
from ballast_operator.cli.live.connection import asked, cluster_errors, kubeconfig_option
from ballast_operator.cli.live.whatif_over_time import changed, limited, priced_pools, with_spot_limits
from ballast_operator.cli.option_names import Number, import_from_here, with_option
from ballast_operator.cli.simulate.input import is_folder_of_prices, progress_bar, read_amounts

if TYPE_CHECKING:
    from ballast_policies.allocation.problem import Problem
    from ballast_policies.simulator.clock import OnProgress
    from ballast_policies.simulator.whatif import Comparison, Setup, Side

    from ballast_operator.allocator.problem.snapshot import Snapshot
    from ballast_operator.api.cluster_policy import ClusterPolicy, Objective
    from ballast_operator.kube.caches import Caches
    from ballast_operator.kube.client import Cluster
    from ballast_operator.kube.kinds import Object


@click.command()
@click.option(
    "--policy",
    metavar="NAME",
    help="Another policy; default: the one in force.",
)
@click.option("--agnostic", is_flag=True, help="The other policy takes all GPU types for equally fast.")
@click.option("--add", "more", metavar="TYPE=N,...", help="GPUs added, as v100=8; negative: taken away.")
@click.option(
    "--prices",
    metavar="TYPE=PRICE,...|FOLDER",
    help="Other prices of a GPU hour; or a folder of price logs, or excerpt, those that come with Ballast: "
    "what the jobs of the last days would have cost there, by default under min-cost-slo.",
)
@click.option(
    "--spot",
    metavar="onDemandShare=F,mostInOnePool=F",
    help="Other limits of spot machines than spec.spot of the ClusterPolicy.",
)
@click.option(
    "--days",
    type=Number(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="With --prices FOLDER: jobs created within this many days, with all their steps.",
)
@click.option(
    "--start",
    metavar="TIME",
    help="With --prices FOLDER: the moment of the logs at which "
    "the first of them arrives. [default: the first price]",
)
@click.option(
    "--over-time",
    "hours",
    type=Number(min=0, min_open=True, max=8760),
    metavar="HOURS",
    help="Also when each job would start and end within this many hours, without further jobs.",
)
@click.option("--cluster-policy", default="", help="Name of the ClusterPolicy; default: the only one.")
@kubeconfig_option
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def whatif(
    policy: str | None,
    prices: str | None,
    days: float,
    start: str | None,
    cluster_policy: str,
    kubeconfig: str | None,
    **other: Any,
) -> None:
    """Show which jobs would gain and which would lose; nothing is changed on the cluster."""
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.simulator.whatif import Setup

    output = other.pop("output")
    if is_folder_of_prices(prices):
        if cluster_policy or any(value not in (None, False) for value in other.values()):
            raise click.UsageError(
                "--agnostic, --add, --spot, --over-time, --cluster-policy: not with --prices FOLDER. "
                "To fix: leave them out"
            )
        replay_cluster = from_lab("whatif-prices", "--prices FOLDER")
        chosen = policy or "min-cost-slo"
        with cluster_errors():
            replay_cluster(
                prices, policy=chosen, days=days, start=start, kubeconfig=kubeconfig, output=output
            )
        return
    if start is not None:
        raise click.UsageError("--start: for --prices FOLDER. To fix: leave it out, or name a folder of logs")
    more = {} if other["more"] is None else read_amounts(other["more"], "--add", int)
    amounts = {} if prices is None else read_amounts(prices, "--prices", float)
    import_from_here(policy or "")
    try:
        live = asked(kubeconfig, lambda cluster: read_cluster(cluster, cluster_policy))
        with progress_bar(output) as progress:
            after = Setup(
                policy=policy or live.policy.spec.objective.policy,
                agnostic=other["agnostic"],
                more=more,
                prices=amounts,
            )
            content, text = _compared(
                live, after, spot=other["spot"], hours=other["hours"], progress=progress
            )
    except ProblemError as error:
        raise click.UsageError(with_option(str(error), {"more": "--add"})) from error
    click.echo(json.dumps(content, indent=2) if output == "json" else text)


def _compared(
    live: "LiveCluster",
    after: "Setup",
    *,
    spot: str | None,
    hours: float | None,
    progress: "OnProgress | None",
) -> tuple[dict[str, Any], str]:
    """(as JSON, as text) ``live``, and as it would be ``after``.

    ``spot``: limits of spot machines, as text; None: those in force. ``hours``: for which is simulated; None:
    only shares are compared.

    Raises:
        ProblemError: a policy cannot be used.
    """
    from ballast_policies.simulator.whatif import Setup, Side, compare

    objective = live.policy.spec.objective
    limits = live.policy if spot is None else with_spot_limits(live.policy, spot)
    then = limited(changed(live.snapshot, after), limits)
    if spot is not None:
        after = dataclasses.replace(after, gpus={pool.pool: pool.gpus for pool in then.usable_pools})
    before = Setup(policy=objective.policy, agnostic=objective.heterogeneity_agnostic)
    sides, said = [], dict[str, None]()
    for setup, snapshot in ((before, live.snapshot), (after, then)):
        problem, notes = pose(snapshot, objective, after.policy, prices=after.prices)
        pools, usd_per_step = priced_pools(snapshot)
        sides.append(Side(setup=setup, problem=problem, pools=pools, usd_per_step=usd_per_step))
        said |= dict.fromkeys(notes)
    sides, more_notes = _with_large_gangs(sides, live.snapshot)
    notes = (*said, *more_notes)
    if hours is None:
        notes += tuple(f"left out: {line}" for line in live.left_out)
    found = compare(*sides)
    content = {**found.to_json(), "notes": list(notes)}
    text = "\n".join([as_text(found), *(f"note: {note}" for note in notes)])
    if hours is not None:
        from ballast_operator.cli.live.whatif_over_time import over_time

        courses = over_time(live, (before, after), hours=hours, then=limits, progress=progress)
        content |= {"over_time": courses.to_json()}
        text += f"\n\n{courses.as_text()}"
    return content | {"twin": live.twin}, f"{text}\n{_error_bar(live.twin)}"


def _error_bar(twin: Mapping[str, Any] | None) -> str:
    """Error of the simulator lately, in a line."""
    if twin is None or twin.get("timeError") is None:
        return "error bar: not known; an operator that keeps history replays each day (ballast twin)"
    cost = "" if twin.get("costError") is None else f", costs by {twin['costError']:+.1%}"
    return (
        f"error bar: completion times of the last replay were off by {twin['timeError']:+.1%}{cost} "
        f"({twin['jobs']} jobs that ended before {twin['time']})"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveCluster:
    """Cluster, policy and jobs that the operator would decide on at a moment.

    Attributes:
        resizable: names of the jobs that change their size without a restart, once they train.
        twin: ``status.twin`` of the policy: how far the last replay of the cluster was off; None: not known.
    """

    at: datetime.datetime
    policy: "ClusterPolicy"
    snapshot: "Snapshot"
    resizable: frozenset[str]
    twin: Mapping[str, Any] | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Jobs that want GPUs and cannot have them, with the reason."""
        return tuple(f"{'/'.join(one.view.key)}: {one.refusal.message}" for one in self.snapshot.refused)


async def read_cluster(
    cluster: "Cluster", cluster_policy: str = "", *, more: Sequence["Object"] = ()
) -> LiveCluster:
    """State that the operator would decide on now, with ``more`` jobs.

    Raises:
        ProblemError: there is no such ClusterPolicy, or several and none was named, or it is not usable.
    """
    from ballast_operator.kube.kinds import JOB

    caches = await _read_caches(cluster)
    for job in more:
        caches[JOB].put(job)
    return _decided_on(caches, _policy_in(caches, cluster_policy))


async def read_change(cluster: "Cluster", changed: "Object") -> tuple[LiveCluster, LiveCluster]:
    """The cluster under its policy, and under ``changed``. Raises ProblemError, as :func:`read_cluster`."""
    caches = await _read_caches(cluster)
    name = str((changed.get("metadata") or {}).get("name") or "")
    there = _policy_in(caches, name)
    return _decided_on(caches, there), _decided_on(caches, {**there, "spec": changed.get("spec")})


async def _read_caches(cluster: "Cluster") -> "Caches":
    from ballast_operator.kube.caches import SELECTORS, WATCHED, Caches

    caches = Caches()
    for kind in WATCHED:
        items, version = await cluster.list(kind, label_selector=SELECTORS.get(kind, ""))
        caches.listed(kind, items, version)
    return caches


def _policy_in(caches: "Caches", name: str) -> "Object":
    from ballast_policies.allocation.problem import ProblemError

    from ballast_operator.api.conditions import NO_POLICY
    from ballast_operator.kube.kinds import POLICY

    policies = {item["metadata"]["name"]: item for item in caches[POLICY]}
    name = name or (next(iter(policies)) if len(policies) == 1 else "")
    if name not in policies:
        if not policies:
            raise ProblemError(NO_POLICY)
        wrong = f"there is no ClusterPolicy {name}" if name else "--cluster-policy: not given"
        raise ProblemError(f"{wrong}; the cluster has {', '.join(sorted(policies))}")
    return policies[name]


def _decided_on(caches: "Caches", item: "Object") -> LiveCluster:
    """Cluster that the operator would decide on under the ClusterPolicy ``item``."""
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.scheduling.gang_spec import job_id

    from ballast_operator.allocator.costs.bill import pool_infos
    from ballast_operator.allocator.costs.price_feeds import saved_prices, with_prices
    from ballast_operator.allocator.decider import Decider
    from ballast_operator.allocator.problem.capacity import in_todays_pools
    from ballast_operator.allocator.problem.snapshot import Observed
    from ballast_operator.api.read import InvalidObject, read_cluster_policy
    from ballast_operator.kube.kinds import POD, Key
    from ballast_operator.metrics import Metrics
    from ballast_operator.observation.observer import Observer
    from ballast_operator.views.job import pods_of_gangs
    from ballast_operator.views.nodes import stuck_pods

    try:
        policy = read_cluster_policy({**item, "status": {}})
    except InvalidObject as error:
        raise ProblemError(f"ClusterPolicy {item['metadata']['name']} cannot be used: {error}") from error
    status = item.get("status")
    policy = with_prices(policy, saved_prices(status))
    observer, decider, now = Observer(caches), Decider(Metrics()), datetime.datetime.now(datetime.UTC)
    nodes, faults = observer.nodes(), dict[Key, Exception]()
    jobs = in_todays_pools(observer.jobs(), policy, nodes, faults)
    pools = pool_infos(policy.spec.node_pools, {}, status, at=now)
    seen = Observed(
        now=now,
        nodes=nodes,
        pods=caches[POD].of_no_job(),
        jobs=jobs,
        status=status,
        regions={name: info.region for name, info in pools.items()},
        stuck=stuck_pods(caches[POD], pods_of_gangs(jobs), now),
    )
    decider.look(policy, seen, [], pools)
    snapshot = decider.build_problem(policy, seen, faults).snapshot
    resizable = {
        job_id(view.key)
        for view in jobs
        if view.spec is not None and view.spec.grow and not view.spec.is_script
    }
    twin = (status or {}).get("twin")
    return LiveCluster(at=now, policy=policy, snapshot=snapshot, resizable=frozenset(resizable), twin=twin)


def pose(
    snapshot: "Snapshot", objective: "Objective", other: str, *, prices: Mapping[str, float] | None = None
) -> tuple["Problem", tuple[str, ...]]:
    """(the problem with all that both policies need, the defaults that are in it).

    A price in ``prices`` that no pool has counts on both sides.

    Raises:
        ProblemError: there is no such policy.
    """
    from ballast_policies.allocation.problem import ProblemError
    from ballast_policies.allocation.registry import find_policy
    from ballast_policies.scheduling.inputs import complete

    from ballast_operator.allocator.decider import teams

    try:
        find_policy(other)
    except ProblemError as error:
        raise ProblemError(f"--{error}") from error
    problem = snapshot.problem
    given = {t: price for t, price in (prices or {}).items() if t in problem.gpu_types}
    problem = dataclasses.replace(problem, prices={**given, **problem.prices})
    notes: dict[str, None] = {}
    for policy in (objective.policy, other):
        inputs = complete(policy, teams(objective), problem, snapshot.unmeasured)
        problem = inputs.problem
        notes |= dict.fromkeys(inputs.pool_defaults)
        notes |= dict.fromkeys(
            f"{job}: {words}" for job, said in inputs.job_defaults.items() for words in said
        )
    return problem, tuple(notes)


def as_text(found: "Comparison") -> str:
    """A table of the jobs that gain or lose, and the totals."""
    lines = [f"{'job':40} {'steps/s now':>12} {'then':>12} {'change':>9}  GPU types then"]
    for job in sorted(found.jobs, key=lambda job: (job.verdict != "loses", job.verdict == "same", job.job)):
        change = (
            "new" if job.change is None and job.after else "-" if job.change is None else f"{job.change:+.0%}"
        )
        types = ", ".join(f"{t} {x:.0%}" for t, x in job.types_after.items()) or "none"
        lines.append(f"{job.job:40} {job.before:12.3f} {job.after:12.3f} {change:>9}  {types}")
    count = {
        verdict: sum(job.verdict == verdict for job in found.jobs) for verdict in ("gains", "loses", "same")
    }
    agnostic = " (heterogeneity-agnostic)" if found.after.agnostic else ""
    lines.append(
        f"{found.before.policy} -> {found.after.policy}{agnostic}: {count['gains']} gain, "
        f"{count['loses']} lose, {count['same']} the same; least level {found.least_level_before:.3f} -> "
        f"{found.least_level_after:.3f}; cost per hour {found.cost_before:.2f} -> {found.cost_after:.2f}"
    )
    return "\n".join(lines)


def _with_large_gangs(sides: "list[Side]", snapshot: "Snapshot") -> "tuple[list[Side], tuple[str, ...]]":
    """(both sides with the gangs that only several pools hold, what has to be said of them)."""
    from ballast_policies.rounds.divisions import with_mixtures

    large = sorted(name for name, gang in snapshot.mixed.items() if not gang.fits_one_pool)
    if not large:
        return sides, ()
    found = []
    for side in sides:
        setup = side.setup
        problem = with_mixtures(side.problem, snapshot.mixed, setup.policy, agnostic=setup.agnostic)
        if problem is side.problem:
            text = f"{setup.policy}{' (heterogeneity-agnostic)' if setup.agnostic else ''}"
            return sides, (f"{', '.join(large)}: no pool holds it, so it has no share under {text}",)
        found.append(dataclasses.replace(side, problem=problem))
    return found, (f"{', '.join(large)}: over several pools, as they are now",)
