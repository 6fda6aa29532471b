"""The gain of second jobs on a GPU over whole GPUs, and their loss against pairs by the policy.

    python lab/benchmarks/simulator/second_jobs.py

Jobs of one GPU that all arrive at the start, on Gavel's speeds alone and in pairs, all of them known, by the
operator's rules: whole GPUs; second jobs, as its rounds put them beside first ones (decision 411); and pairs
that the policy chooses as columns of its program (``--space-sharing``).
"""

import argparse
import dataclasses
from unittest import mock

from ballast_lab.commands.simulate_arrays import array_simulation
from ballast_policies.rounds.gangs import SharedGpus, SharingJob
from ballast_policies.simulator import engine
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.result import Result
from ballast_policies.simulator.settings import SimulatedCluster, SimulationSettings
from ballast_policies.simulator.workloads import Generated, Workload
from ballast_policies.throughput.estimator import PairSpeeds
from ballast_policies.throughput.table import ThroughputTable, built_in_table


def shared_gpus(workload: Workload, cluster: SimulatedCluster, table: ThroughputTable) -> SharedGpus:
    """All GPUs, for two jobs each, with all speeds of pairs measured; memory decides nothing."""
    types = {job.type for job in workload.jobs}
    measured = {
        kind: {
            (one.name, other.name): table.shared(one, other, kind)[0] / alone
            for one in types
            for other in types
            if (alone := table.alone(one, kind)) > 0
        }
        for kind in cluster.gpus
    }
    return SharedGpus(
        jobs={
            f"job-{row:07d}": SharingJob(kind=job.type.name, memory=1.0, known_alone=frozenset(cluster.gpus))
            for row, job in enumerate(workload.jobs)
        },
        memory={node.name: 2.0 for node in engine.nodes_of(Ledger(cluster, table))},
        speeds=PairSpeeds(measured),
    )


def with_second_jobs(
    workload: Workload, cluster: SimulatedCluster, table: ThroughputTable, settings: SimulationSettings
) -> Result:
    """The simulation on GPUs that jobs may share."""
    shared, whole = shared_gpus(workload, cluster, table), engine.cluster_of
    with mock.patch.object(
        engine, "cluster_of", lambda *given: dataclasses.replace(whole(*given), shared=shared)
    ):
        return engine.simulate(workload, cluster, table, settings)


def main() -> None:
    """A line a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=6, help="of each of three types")
    parser.add_argument("--policy", nargs="*", default=["max-min-fairness", "makespan"])
    parser.add_argument("--seed", type=int, nargs="*", default=[0, 1])
    chosen = parser.parse_args()
    table, kinds = built_in_table("simulation"), ("v100", "p100", "k80")
    cluster = SimulatedCluster(gpus=dict.fromkeys(kinds, chosen.gpus), gpus_per_node=dict.fromkeys(kinds, 1))
    print(f"{'policy':20}{'seed':>5}{'':14}{'whole':>8}{'second':>8}{'pairs':>8}{'second/pairs':>14}")
    for policy in chosen.policy:
        for seed in chosen.seed:
            workload = Generated(table=table, count=chosen.jobs, seed=seed, several_gpus=False).workload()
            settings = SimulationSettings(policy=policy)
            whole = engine.simulate(workload, cluster, table, settings)
            second = with_second_jobs(workload, cluster, table, settings)
            pairs = array_simulation("ballast", space_sharing=True, ideal=False, seed=0, policy=policy)(
                workload, dataclasses.replace(cluster, gpus_per_node={}), table
            )
            for name in ("average_completion_time", "makespan"):
                hours = [getattr(result, name) / 3600 for result in (whole, second, pairs)]
                print(
                    f"{policy:20}{seed:5}{name[:7]:>14}" + "".join(f"{each:8.1f}" for each in hours),
                    f"{hours[1] / hours[2]:13.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
