"""What a decision computes: from views to a problem, and from the policy's shares to assignments.

Nothing here waits or talks to the API server; the allocator calls it in a thread, one call at a time.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping

from ballast_policies.allocation.fairness.teams import parts
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PriceClasses
from ballast_policies.allocation.problem import Problem
from ballast_policies.allocation.registry import find_policy
from ballast_policies.rounds import with_mixtures

from ballast_operator.allocator.advice import advice_by_job
from ballast_operator.allocator.assignments import assignments_of
from ballast_operator.allocator.costs.bill import written_bill
from ballast_operator.allocator.costs.paid import Paid
from ballast_operator.allocator.costs.teams import next_change, next_team_costs, spent_budgets
from ballast_operator.allocator.faults import Faults
from ballast_operator.allocator.next_growth import next_growth
from ballast_operator.allocator.problem.admission import Admissions
from ballast_operator.allocator.problem.budgets import SpentBudget
from ballast_operator.allocator.problem.hazards import SeenNodes, at_useful_prices
from ballast_operator.allocator.problem.inputs import (
    CompletedProblem,
    complete,
    data_costs,
    price_classes,
    structure,
    values,
)
from ballast_operator.allocator.problem.jobs.snapshot_jobs import SnapshotJobs
from ballast_operator.allocator.problem.snapshot import Snapshot, take_snapshot
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.reporting.policy_status import PolicyReport
from ballast_operator.allocator.rounds import ProposedRound, Rounds
from ballast_operator.allocator.solving.solver import Solve
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.metrics import Metrics
from ballast_operator.report.team_costs import team_costs
from ballast_operator.views.assignment import Assignment, PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the policy is asked.

    Attributes:
        snapshot: the cluster.
        inputs: its problem, completed.
        classes: the columns of the problem that is solved.
        problem: over these columns.
        structure, values: equal where the last answer still holds; see :mod:`.problem.inputs`.
        seen_nodes: of spot pools, with this decision.
    """

    snapshot: Snapshot
    seen_nodes: SeenNodes
    inputs: CompletedProblem
    classes: PriceClasses
    problem: Problem
    structure: tuple[object, ...]
    values: list[list[object]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An assignment for each job, and what the policy's status says of the round.

    Attributes:
        snapshot: what was decided on.
        proposed: the round, which is in force once the decision is kept.
    """

    assignments: Mapping[Key, Assignment]
    report: PolicyReport
    snapshot: Snapshot
    proposed: ProposedRound


class Decider:
    """Decides for one ClusterPolicy after the other.

    :meth:`look` takes in what has happened; :meth:`ask` and :meth:`conclude` decide and change nothing, so
    that they can be called again without a job for which they raise; :meth:`keep` puts a decision in force.

    Attributes:
        faults: jobs that are left out of decisions, as these raise for them.
        measurements: what trainers have reported.
        rounds: what is remembered from round to round.
        growth_at: when the next gang that has just changed its size may grow, epoch seconds; None: none does.
        budgets_at: when the next team's budget is spent or begins again, epoch seconds; None: not known.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.faults = Faults(metrics)
        self.measurements = Measurements()
        self.rounds = Rounds()
        self.budgets_at: float | None = None
        self.growth_at: float | None = None
        self.seen_nodes = SeenNodes()
        self.paid = Paid()
        self._admissions = Admissions()
        self._made = SnapshotJobs()

    def look(
        self,
        policy: ClusterPolicy,
        jobs: list[JobView],
        *,
        seen: list[JobView],
        started: Time,
        item: Object | None = None,
        pools: Mapping[str, PoolInfo] | None = None,
    ) -> Mapping[str, SpentBudget]:
        """Take in what jobs have paid and reported; returns teams that have spent their budget.

        Args:
            policy: in force, with the prices of feeds.
            jobs: all.
            seen: views of jobs that have come since the last time.
            started: now.
            item: the ClusterPolicy as it is stored; its status has what teams and pools have cost.
            pools: with the prices that jobs pay.
        """
        status = (item or {}).get("status")
        bill, bill_at = written_bill(status)
        teams = team_costs(status, bill_at or started)
        self.paid = self.paid.next(jobs, pools or {}, bill, teams, bill_at, started)
        teams = next_team_costs(status or {}, policy, self.paid, started)
        self.budgets_at = next_change(policy, teams, started)
        with self._taken_in("who shares a GPU is not seen"):
            self.measurements.partners.look(jobs)
        for view in (*seen, *jobs):
            with self._taken_in("job=%s/%s report not used", *view.key):
                self.measurements.record(view)
        self.measurements.keep(view.key for view in jobs)
        return spent_budgets(policy, teams)

    def ask(
        self,
        policy: ClusterPolicy,
        jobs: list[JobView],
        *,
        nodes: Mapping[str, NodeView],
        pods: list[Object],
        started: Time,
        spent: Mapping[str, SpentBudget],
        item: Object | None = None,
        pools: Mapping[str, PoolInfo] | None = None,
        left_out: Mapping[Key, Exception] | None = None,
    ) -> Question:
        """The problem to be solved.

        Args:
            policy: in force, with the prices of feeds.
            jobs: all.
            nodes: all.
            pods: of others.
            started: now.
            spent: teams that have spent their budget.
            item: the ClusterPolicy as it is stored; its status has how often machines are lost.
            pools: with the regions of their nodes.
            left_out: jobs at fault, with their errors.
        """
        snapshot = take_snapshot(
            policy.spec,
            nodes=nodes,
            pods=pods,
            jobs=jobs,
            measurements=self.measurements,
            admissions=self._admissions,
            made=self._made,
            now=started,
            spent=spent,
            regions={name: info.region for name, info in (pools or {}).items()},
            left_out=left_out,
        )
        inputs = complete(policy.spec.objective, snapshot.problem, snapshot.unmeasured)
        faulty = {job.key for job in snapshot.faulty}
        considered = [view for view in jobs if view.key not in faulty]
        priced = at_useful_prices(snapshot.capacity.pools, policy.spec.node_pools, (item or {}).get("status"))
        capacity = dataclasses.replace(snapshot.capacity, pools=priced)
        closed = snapshot.closed_pools
        name, moment = policy.spec.objective.policy, started.timestamp()
        besides = data_costs(name, snapshot)
        prices = inputs.problem.prices
        classes = price_classes(name, capacity, prices, closed, by_region=bool(besides))
        agnostic = policy.spec.objective.heterogeneity_agnostic
        posed = with_mixtures(inputs.problem, snapshot.mixed, name, agnostic=agnostic)
        asked = dataclasses.replace(inputs, problem=classes.split(posed, closed, besides))
        return Question(
            snapshot=snapshot,
            seen_nodes=self.seen_nodes.next(snapshot.capacity, nodes, considered),
            inputs=inputs,
            classes=classes,
            problem=asked.problem,
            structure=(
                policy.metadata.generation,
                *structure(name, asked, snapshot.unmeasured, moment=moment),
            ),
            values=values(name, asked.problem),
        )

    def conclude(
        self, policy: ClusterPolicy, question: Question, solve: Solve, jobs: list[JobView], started: Time
    ) -> Decision:
        """From shares to an assignment for each job.

        Raises:
            JobFaults: jobs for which there is none.
        """
        snapshot, inputs, classes = question.snapshot, question.inputs, question.classes
        proposed = self.rounds.propose(
            policy,
            snapshot,
            solve.allocation,
            classes=classes,
            parts=team_parts(policy.spec.objective.policy, inputs.problem),
            moment=started.timestamp(),
        )
        # From here on by GPU type: that is what people asked for, and read.
        solve = dataclasses.replace(solve, allocation=classes.merge(solve.allocation))
        assignments = assignments_of(
            snapshot,
            proposed.round_,
            solve.allocation,
            advice=advice_by_job(policy.spec.objective.policy, snapshot, inputs, solve.allocation, jobs),
            plan_id=proposed.plan_id,
            dry_run=policy.spec.dry_run,
        )
        report = PolicyReport(
            snapshot=snapshot,
            seen_nodes=question.seen_nodes,
            paid=self.paid,
            inputs=inputs,
            jobs=jobs,
            policy=policy,
            solve=solve,
            round_=proposed.round_,
            plan_id=proposed.plan_id,
            time=started,
        )
        return Decision(assignments=assignments, report=report, snapshot=snapshot, proposed=proposed)

    def keep(self, question: Question, decision: Decision, started: Time) -> None:
        """The decision is in force."""
        self.rounds.keep(decision.proposed, decision.snapshot)
        self.seen_nodes = question.seen_nodes
        growth = next_growth(decision.snapshot, started)
        self.growth_at = None if growth is None else growth.timestamp()
        self.faults.tell(decision.snapshot.faulty)

    @contextlib.contextmanager
    def _taken_in(self, failure: str, *names: str) -> Iterator[None]:
        """What was measured and cannot be used counts as not measured."""
        try:
            yield
        except Exception:
            logger.exception(failure, *names)
            self._metrics.reconcile_errors.labels("Report").inc()


def team_parts(policy: str, problem: Problem) -> Mapping[str, float] | None:
    """Job -> its team's part of the cluster, by a policy that reads teams; None: it does not."""
    if Reads.TEAMS not in find_policy(policy).reads:
        return None
    return dict(zip((job.name for job in problem.jobs), parts(instance(problem)).tolist(), strict=True))
