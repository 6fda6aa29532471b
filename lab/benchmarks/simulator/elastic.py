"""Average completion time of elastic jobs, beside Sia's reference runs where its workloads are available.

    python lab/benchmarks/simulator/elastic.py --file sia-elastic.json --workload philly/workload-1
    python lab/benchmarks/simulator/elastic.py

Sia's workloads (github.com/siasosp23/artifacts) carry no licence to redistribute, so they are not in this
repository: the first form reads a file that has them.  The second runs generated jobs (Amdahl's law).
"""

import argparse
import sys
import time
from pathlib import Path

from ballast_policies.simulator.elastic import simulate
from ballast_policies.simulator.elastic_file import Sizes, read_workload

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.support.elastic_workloads import file

SIA_SECONDS = {"philly/workload-1": 1969.0, "saturn/workload-1": 2135.0}
"""Average completion time in the artifact's own simulator: batch sizes fixed, speeds known, 60-s rounds."""

RUNS: tuple[tuple[str, Sizes], ...] = (
    ("completion-time", "stated"),
    ("completion-time", "all"),
    ("completion-time", "requested"),
    ("sia", "stated"),
)


def main() -> None:
    """A line a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path)
    parser.add_argument("--workload", nargs="*", default=list(SIA_SECONDS))
    chosen = parser.parse_args()
    if chosen.file is None:
        texts = {f"generated, seed {seed}": file(100, seed) for seed in range(3)}
    else:
        text = chosen.file.read_text(encoding="utf-8")
        texts = dict.fromkeys(chosen.workload, text)
    print(
        f"{'workload':24}{'policy':18}{'sizes':12}{'average s':>10}{'alone s':>9}{'Sia':>7}"
        f"{'restarts':>10}{'CPU s':>7}"
    )
    for name, text in texts.items():
        for policy, sizes in RUNS:
            begin = time.process_time()
            workload = read_workload(text, workload=None if chosen.file is None else name, sizes=sizes)
            result = simulate(workload, policy=policy)
            average, reference = result.average_completion_time, SIA_SECONDS.get(name)
            ratio = "" if reference is None else f"{average / reference:.2f}"
            print(
                f"{name:24}{policy:18}{sizes:12}{average:10,.0f}{result.average_alone:9,.0f}{ratio:>7}"
                f"{result.restarts_per_job:10.2f}{time.process_time() - begin:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
