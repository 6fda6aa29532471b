"""Checks the state machine of launch, shrink, growth, preemption and migration over all interleavings.

``python -m tests.policies.protocol.check`` explores the small bounds of the tests, ``--large`` those that
take minutes; it prints the states and transitions of each.
"""

import argparse
import json
import time
from pathlib import Path

from tests.policies.protocol.laws import is_end, problem
from tests.policies.protocol.model import Budget, Job, World
from tests.policies.protocol.search import (
    Explored,
    check_an_end_is_always_reachable,
    check_every_fair_run_ends,
    explore,
)
from tests.policies.protocol.steps import Steps

Bound = tuple[tuple[int, ...], int, dict[str, int]]
"""(pods of each job, GPUs, what may go wrong how often)."""

SMALL: dict[str, Bound] = {
    "two jobs take turns": ((1, 1), 1, {}),
    "the operator dies anywhere": ((2, 1), 2, {"shrinks": 1, "crashes": 1}),
    "the operator dies twice": ((2,), 2, {"shrinks": 1, "crashes": 2}),
    "a leader is replaced with requests under way": ((1, 1), 1, {"crashes": 1, "in_flight": 1}),
    "preempted as the leader is replaced": (
        (1,),
        1,
        {"crashes": 1, "in_flight": 1, "preemptions": 1},
    ),
    "a pod is killed as the leader is replaced": ((1,), 1, {"kills": 1, "crashes": 1, "in_flight": 1}),
    "a leader is replaced during a shrink": ((2,), 2, {"shrinks": 1, "crashes": 1, "in_flight": 1}),
    "answers are lost": ((2,), 2, {"shrinks": 1, "lost_answers": 2}),
    "an answer is lost while another job waits": ((1, 1), 1, {"lost_answers": 1}),
    "a rank fails": ((2,), 2, {"failures": 1, "shrinks": 1, "crashes": 1}),
    "the job fails for good": ((2,), 2, {"failures": 2}),
    "a pod is killed": ((2,), 2, {"kills": 1, "shrinks": 1}),
    "a pod is deleted by someone else": ((2,), 2, {"evictions": 1, "shrinks": 1}),
    "the trainer hangs": ((2,), 2, {"hangs": 1, "shrinks": 1, "crashes": 1}),
    "deadlines pass early": ((2,), 2, {"early": 1, "shrinks": 1}),
    "the plan is deleted": ((2,), 2, {"lost_plans": 1, "shrinks": 1, "crashes": 1}),
    "preempted, with a shrink under way": ((2,), 2, {"preemptions": 1, "shrinks": 1, "crashes": 1}),
    "preempted for another job": ((1, 1), 1, {"preemptions": 1}),
    "suspended": ((2,), 2, {"suspensions": 1, "shrinks": 1}),
    "grown": ((1,), 2, {"growths": 1, "crashes": 1, "kills": 1}),
    "grown and shrunk": ((1,), 2, {"growths": 1, "shrinks": 1, "lost_answers": 1}),
    "rank 0 lies": ((2,), 2, {"lies": 1, "shrinks": 1}),
    "asked to shrink, and the operator dies anywhere": ((2,), 2, {"asks": 1, "crashes": 1}),
    "asked to shrink for a job that waits": ((2, 1), 2, {"asks": 1}),
    "asked to shrink, and the trainer does not": ((2,), 2, {"asks": 1, "refusals": 1, "crashes": 1}),
    "asked to shrink while the trainer proposes it": ((2,), 2, {"asks": 1, "shrinks": 1}),
    "asked to shrink, and rank 0 lies": ((2,), 2, {"asks": 1, "lies": 1}),
    "asked to shrink, and a pod is killed": ((2,), 2, {"asks": 1, "kills": 1}),
    "asked to shrink, and answers are lost": ((2,), 2, {"asks": 1, "lost_answers": 2}),
    "asked to shrink, and the trainer hangs": ((2,), 2, {"asks": 1, "hangs": 1}),
    "grown, then asked to shrink": ((1,), 2, {"growths": 1, "asks": 1}),
    "a node announces that it goes": ((2,), 2, {"notices": 1, "crashes": 1}),
    "all nodes announce that they go": ((2,), 2, {"notices": 2}),
    "a node goes earlier than announced": ((2,), 2, {"notices": 1, "early": 1}),
    "a node goes during a shrink": ((2,), 2, {"notices": 1, "shrinks": 1}),
    "a node goes, and the trainer does not shrink": ((2,), 2, {"notices": 1, "refusals": 1}),
    "a node goes, and the trainer hangs": ((2,), 2, {"notices": 1, "hangs": 1}),
    "a node goes, and answers are lost": ((2,), 2, {"notices": 1, "lost_answers": 1}),
    "a node goes as the gang grows": ((1,), 2, {"growths": 1, "notices": 1}),
    "a node goes as the gang is preempted": ((2,), 2, {"notices": 1, "preemptions": 1}),
    "a node goes during an asked shrink": ((2,), 2, {"notices": 1, "asks": 1}),
    "a node goes as the job is suspended": ((2,), 2, {"notices": 1, "suspensions": 1}),
    "a node stays after all": ((2,), 2, {"notices": 1, "withdrawals": 1}),
    "a node is drained": ((2,), 2, {"drains": 1, "crashes": 1}),
    "a node is drained while another job waits": ((1, 1), 1, {"drains": 1}),
    "asked to shrink and preempted": ((2,), 2, {"asks": 1, "preemptions": 1}),
}

SCRIPTS: dict[str, Bound] = {
    "scripts take turns": ((1, 1), 1, {}),
    "a script, and the operator dies anywhere": ((2,), 2, {"crashes": 1, "lost_answers": 1}),
    "a script, and a leader is replaced with requests under way": ((1, 1), 1, {"crashes": 1, "in_flight": 1}),
    "a rank of a script fails": ((2,), 2, {"failures": 1, "early": 1}),
    "a pod of a script is killed": ((2,), 2, {"kills": 1, "crashes": 1}),
    "a pod of a script is deleted by someone else": ((2,), 2, {"evictions": 1}),
    "a script is preempted": ((2,), 2, {"preemptions": 1, "crashes": 1}),
    "a script is preempted for another": ((1, 1), 1, {"preemptions": 1}),
    "the node of a script goes": ((2,), 2, {"notices": 1, "preemptions": 1}),
    "the node of a script is drained": ((2,), 2, {"drains": 1}),
    "a script is suspended, and its plan deleted": ((2,), 2, {"suspensions": 1, "lost_plans": 1}),
}
"""As above, of jobs that run their template's own command."""

COPIES: dict[str, Bound] = {
    "a pod is lost, and the operator dies anywhere": ((2,), 2, {"kills": 1, "crashes": 1}),
    "a pod is lost, and answers are lost": ((2,), 2, {"kills": 1, "lost_answers": 1}),
    "a pod is lost, and another": ((3,), 3, {"kills": 2}),
    "a pod is lost, and the trainer hangs": ((2,), 2, {"kills": 1, "hangs": 1}),
    "a pod is lost, and its layers are not taken over": ((2,), 2, {"kills": 1, "refusals": 1}),
    "a pod is lost during an asked shrink": ((2,), 2, {"kills": 1, "asks": 1}),
    "a pod is lost as the gang grows back": ((2,), 2, {"kills": 2, "growths": 1}),
    "a pod is deleted, and its node goes": ((2,), 2, {"evictions": 1, "notices": 1}),
    "a pod is lost as its node goes earlier than announced": ((2,), 2, {"notices": 1, "early": 1}),
    "a pod is lost for a job that waits": ((2, 1), 2, {"kills": 1}),
    "a pod is lost as the leader is replaced": ((2,), 2, {"kills": 1, "crashes": 1, "in_flight": 1}),
    "a pod comes back as the leader is replaced": (
        (2,),
        2,
        {"kills": 1, "growths": 1, "crashes": 1, "in_flight": 1},
    ),
    "a node is lost, and its pod is made once more": ((2,), 2, {"notices": 1, "crashes": 1, "in_flight": 1}),
}
"""As above, of jobs whose ranks go on in place without a pod that is lost."""

LARGE: dict[str, Bound] = {
    "two jobs, a shrink, a killed pod": ((2, 1), 2, {"kills": 1, "shrinks": 1}),
    "two jobs, a preemption, a lost answer": ((2, 1), 2, {"lost_answers": 1, "preemptions": 1}),
}


def check(
    bound: Bound,
    steps: Steps | None = None,
    *,
    script: bool = False,
    copies: bool = False,
    most_states: int = 2_000_000,
) -> Explored:
    """Explore a bound: nothing that must not be, an end from everywhere, and every fair run ends.

    Args:
        bound: of what is explored.
        steps: the machine and its operator; None: the product's.
        script: the jobs run their template's own command.
        copies: their ranks go on in place without a pod that is lost.
        most_states: where to give up.

    Raises:
        ViolationError: with the shortest way to what is wrong.
    """
    sizes, gpus, budget = bound
    world = World(tuple(Job(size, script=script, copies=copies) for size in sizes), Budget(**budget), gpus)
    found = explore(world, steps or Steps(), is_end=is_end, check=problem, most_states=most_states)
    assert found.complete, f"more than {most_states} states"
    check_an_end_is_always_reachable(found)
    check_every_fair_run_ends(found)
    return found


def main() -> None:
    """Print a line for each bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also the bounds that take minutes each")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON, too")
    options = parser.parse_args()
    bounds = {**SMALL, **SCRIPTS, **COPIES, **(LARGE if options.large else {})}
    rows = []
    states = transitions = 0
    for name, bound in bounds.items():
        started = time.process_time()
        found = check(bound, script=name in SCRIPTS, copies=name in COPIES)
        rows.append({"bound": name, "states": len(found.states), "transitions": found.transitions})
        states, transitions = states + len(found.states), transitions + found.transitions
        seconds = time.process_time() - started
        print(
            f"{len(found.states):9,} states {found.transitions:10,} transitions {seconds:6.1f} s  {name}",
            flush=True,
        )
    print(f"{states:9,} states {transitions:10,} transitions: nothing that must not be, and always an end")
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
