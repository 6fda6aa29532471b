"""``make chaos SEED=1 FAULTS=200``: play seeded faults, shorten what fails, write the result as JSON."""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

from tests.chaos.faults import Fault, sequence
from tests.chaos.play import VERDICTS, play, shortest

EPISODE = 25
"""Faults that one cluster goes through before its jobs have to end."""


def main() -> int:
    """Play, print a line for each episode, and return 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--replay", type=Path, help="a failing sequence that an earlier run has written")
    parser.add_argument("--output", type=Path, default=Path("out/chaos.json"))
    options = parser.parse_args()
    if options.replay is not None:
        faults = tuple(Fault(**item) for item in json.loads(options.replay.read_text()))
        problem = play(faults).problem
        print(problem or "every job has succeeded")
        return 1 if problem else 0
    everything = sequence(options.seed, options.faults)
    episodes = [everything[start : start + EPISODE] for start in range(0, len(everything), EPISODE)]
    kinds: Counter[str] = Counter()
    longest, failed = 0.0, []
    verdicts = dict.fromkeys([*VERDICTS.values(), "bugs"], 0)
    for number, faults in enumerate(episodes):
        outcome = play(faults)
        kinds.update(fault.kind for fault in faults)
        longest = max(longest, outcome.converged_seconds)
        said = "failed" if outcome.problem else f"converged in {outcome.converged_seconds:g} s"
        print(f"episode {number + 1} of {len(episodes)}: {len(faults)} faults, {said}", flush=True)
        if outcome.problem:
            verdicts[outcome.verdict] += 1
            short = shortest(faults, lambda fewer: bool(play(fewer).problem))
            path = options.output.with_name(f"chaos-{options.seed}-{number + 1}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([dataclasses.asdict(fault) for fault in short], indent=1))
            failed.append({"episode": number + 1, "problem": outcome.problem, "sequence": str(path)})
            print(f"{outcome.problem}\nshortest sequence: {short}\nreplay: --replay {path}", flush=True)
    result = {
        "seed": options.seed,
        "faults": len(everything),
        "kinds": dict(sorted(kinds.items())),
        "jobs": 4 * len(episodes),
        **verdicts,
        "failed": failed,
        "longestConvergenceSeconds": longest,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(everything)} faults of {len(kinds)} kinds, {len(failed)} episodes failed; {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
