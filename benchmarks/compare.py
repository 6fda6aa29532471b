"""The quick benchmarks, and what each costs against the last release: `make bench`.

The cost of a command is CPU seconds, its children's included, over those of a fixed piece of work that is
done before and after it: a ratio that hardly depends on the machine or on what else runs there.
``quick_recorded.json`` has each command's ratio at the last release, and the most that passes. The exit code
is 1 where a command fails or costs more.

    make bench
    make bench ARGS="--only planning --record 0.2.0"
"""

import argparse
import dataclasses
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads of the fixed work would make every ratio small

import numpy as np

FOLDER = Path(__file__).resolve().parent
RECORDED = FOLDER / "quick_recorded.json"
MOST = 1.6
"""A ratio passes up to this many times the recorded one, unless the recording says otherwise: on a machine
with other work, CPU seconds of the same command vary by a third."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one command.

    Attributes:
        command: of ``quick.txt``.
        cpu_seconds: of it and its children.
        ratio: the same over the fixed work's.
        code: its exit code.
    """

    command: str
    cpu_seconds: float
    ratio: float
    code: int


def quick_commands() -> list[str]:
    """Scripts and their options."""
    return (FOLDER / "quick.txt").read_text().splitlines()


def fixed_work() -> float:
    """CPU seconds of sorting, dictionaries and small dense algebra, as the benchmarks do them."""
    began = time.process_time()
    draw = np.random.default_rng(0)
    matrix = draw.random((120, 120))
    for turn in range(300):
        table = {str(number): number * turn for number in range(4000)}
        sum(sorted(table.values(), reverse=True))
        np.linalg.solve(matrix + turn * np.eye(120), matrix)
    return time.process_time() - began


def measure(command: str) -> Cost:
    """Run one command; its output is shown as it comes."""
    print(f"\n$ python benchmarks/{command}", flush=True)
    fixed = [fixed_work()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script, *options = shlex.split(command)
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *options], stdin=subprocess.DEVNULL, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    fixed.append(fixed_work())
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(command=command, cpu_seconds=seconds, ratio=seconds / (sum(fixed) / 2), code=done.returncode)


def judge(costs: Sequence[Cost], recorded: Mapping[str, Mapping[str, float]]) -> tuple[list[str], bool]:
    """(rows of a table, whether all passed)."""
    rows, passed = [], True
    for cost in costs:
        then = recorded.get(cost.command)
        if cost.code:
            verdict, passed = f"FAILED with exit code {cost.code}", False
        elif then is None:
            verdict = "not recorded"
        else:
            times, most = cost.ratio / then["ratio"], then.get("most", MOST)
            verdict = f"{times:5.2f} of the last release's {then['ratio']:.1f}"
            if times > most:
                verdict, passed = f"{verdict}: OVER {most:g}", False
        rows.append(f"{cost.cpu_seconds:7.1f} s CPU  ratio {cost.ratio:6.1f}  {verdict}  {cost.command}")
    return rows, passed


def record(costs: Sequence[Cost], release: str) -> None:
    """Write the ratios down as those of a release; commands that were not run keep theirs."""
    old = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"ratios": {}}
    ratios = {name: row for name, row in old["ratios"].items() if name in quick_commands()}
    for cost in costs:
        if cost.code == 0:
            limits = {key: value for key, value in ratios.get(cost.command, {}).items() if key == "most"}
            ratios[cost.command] = {"ratio": round(cost.ratio, 2), **limits}
    RECORDED.write_text(json.dumps({"release": release, "ratios": ratios}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the commands that contain this text")
    parser.add_argument("--record", metavar="RELEASE", help="write the ratios down as this release's")
    chosen = parser.parse_args()
    commands = [command for command in quick_commands() if chosen.only in command]
    if not commands:
        parser.error(f"--only: no command of quick.txt contains {chosen.only!r}")
    costs = [measure(command) for command in commands]
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"release": "none", "ratios": {}}
    rows, passed = judge(costs, recorded["ratios"])
    print(f"\nCost against {recorded['release']} (load {os.getloadavg()[0]:.1f}):", *rows, sep="\n")
    if chosen.record:
        record(costs, chosen.record)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
