"""Whole decisions: which jobs run where, from the cluster's state, by one policy."""

from ballast_policies.scheduling.assignments import JobAssignment, assign
from ballast_policies.scheduling.decision import (
    Decision,
    Memory,
    SchedulingPolicy,
    SolveRequest,
    apply_allocation,
    build_problem,
    decide,
    isolated_speeds,
)
from ballast_policies.scheduling.state import Capacity, ClusterJob, ClusterState, TenantRooms

__all__ = [
    "Capacity",
    "ClusterJob",
    "ClusterState",
    "Decision",
    "JobAssignment",
    "Memory",
    "SchedulingPolicy",
    "SolveRequest",
    "TenantRooms",
    "apply_allocation",
    "assign",
    "build_problem",
    "decide",
    "isolated_speeds",
]
