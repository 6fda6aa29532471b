"""``make chaos SEED=1 FAULTS=200``: play seeded faults, shorten what fails, write the result as JSON.

Without options the operator's loops run in memory. With ``--real`` everything is a process: control plane,
node agents, two operators behind proxies, trainers; 40 faults take some two minutes.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.chaos import play as memory
from tests.chaos.faults import Fault, sequence
from tests.chaos.kinds.registry import KINDS
from tests.chaos.play import VERDICTS, shortest, verdict_of

EPISODE = 25
"""Faults that one cluster goes through before its jobs have to end."""

REAL_EPISODE, REAL_STEPS, REAL_JOBS = 40, 150, 4
"""The same for processes; steps of each job, and jobs at a time."""

REAL_REPLAYS = 4
"""Times that a failing episode of processes is played again, with fewer faults, to shorten it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What came of one episode."""

    problem: str
    converged_seconds: float
    jobs: int
    kinds: Counter[str]
    more: dict[str, int]


def play_in_memory(faults: Sequence[Fault]) -> Played:
    """The operator's loops, in simulated time."""
    outcome = memory.play(faults)
    kinds = Counter(fault.kind for fault in faults)
    return Played(outcome.problem, outcome.converged_seconds, len(memory.JOBS), kinds, {})


def play_processes(faults: Sequence[Fault]) -> Played:
    """A cluster of processes; its logs stay where it fails."""
    from tests.chaos.processes.play import play

    folder = Path(tempfile.mkdtemp(prefix="ballast-chaos-"))
    found = play(
        faults, folder, steps=REAL_STEPS, at_once=REAL_JOBS, say=lambda line: print(line, flush=True)
    )
    if found.problems:
        print(f"logs and objects: {folder}", flush=True)
    more = {"launches": found.launches, "probeKills": found.probe_kills, "looks": found.looks}
    return Played("\n".join(found.problems), found.converged_seconds, found.jobs, found.applied, more)


def main() -> int:
    """Play, print a line for each episode, and return 1 where one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--real", action="store_true", help="everything is a process")
    parser.add_argument("--replay", type=Path, help="a failing sequence that an earlier run has written")
    parser.add_argument(
        "--output", type=Path, help="default: out/chaos.json, with --real out/chaos-real.json"
    )
    options = parser.parse_args()
    output = options.output or Path(f"out/chaos{'-real' if options.real else ''}.json")
    play: Callable[[Sequence[Fault]], Played] = play_processes if options.real else play_in_memory
    if options.replay is not None:
        faults = tuple(Fault(**item) for item in json.loads(options.replay.read_text()))
        problem = play(faults).problem
        print(problem or "every job has succeeded")
        return 1 if problem else 0
    everything = sequence(options.seed, options.faults, _kinds(real=options.real))
    size = REAL_EPISODE if options.real else EPISODE
    episodes = [everything[start : start + size] for start in range(0, len(everything), size)]
    kinds, more, jobs = Counter[str](), Counter[str](), 0
    longest, failed = 0.0, []
    verdicts = dict.fromkeys([*VERDICTS.values(), "bugs"], 0)
    for number, faults in enumerate(episodes):
        outcome = play(faults)
        kinds.update(outcome.kinds)
        more.update(outcome.more)
        jobs += outcome.jobs
        longest = max(longest, outcome.converged_seconds)
        said = "failed" if outcome.problem else f"converged in {outcome.converged_seconds:g} s"
        print(f"episode {number + 1} of {len(episodes)}: {len(faults)} faults, {said}", flush=True)
        if outcome.problem:
            verdicts[verdict_of(outcome.problem)] += 1
            print(outcome.problem, flush=True)
            path = output.with_name(f"{output.stem}-{options.seed}-{number + 1}.json")
            short = shortest(faults, _fails(play, REAL_REPLAYS if options.real else None))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([dataclasses.asdict(fault) for fault in short], indent=1))
            failed.append({"episode": number + 1, "problem": outcome.problem, "sequence": str(path)})
            print(f"shortest sequence: {short}\nreplay: --replay {path}", flush=True)
        result = {
            "seed": options.seed,
            "faults": kinds.total(),
            "kinds": dict(sorted(kinds.items())),
            "jobs": jobs,
            **more,
            **verdicts,
            "failed": failed,
            "longestConvergenceSeconds": longest,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{kinds.total()} faults of {len(kinds)} kinds, {len(failed)} episodes failed; {output}")
    return 1 if failed else 0


def _kinds(*, real: bool) -> Iterable[str]:
    if not real:
        return KINDS
    from tests.chaos.processes import faults

    return faults.KINDS


def _fails(play: Callable[[Sequence[Fault]], Played], most: int | None) -> Callable[[Sequence[Fault]], bool]:
    """Whether a sequence fails; after ``most`` plays nothing is tried any more."""
    left = most

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal left
        if left is not None:
            if left == 0:
                return False
            left -= 1
        return bool(play(faults).problem)

    return fails


if __name__ == "__main__":
    sys.exit(main())
