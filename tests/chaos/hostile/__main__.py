"""``python -m tests.chaos.hostile --seed 1 --objects 60``: hostile objects on a real API server.

etcd, API server, controllers, scheduler, a node agent and the operator are processes; ordinary jobs run
beside what is hostile. The kinds take turns; 60 objects take some two minutes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.hostile.play import play

SLOWEST_SECONDS = 0.5


def main() -> int:
    """Play, print what came of it, and return 1 where something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--objects", type=int, default=60)
    parser.add_argument(
        "--slowest", type=float, default=SLOWEST_SECONDS, help="seconds that /healthz may take (0.5)"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ballast-hostile-"))
    found = play(options.seed, options.objects, folder, slowest_seconds=options.slowest, say=print)
    for kind in sorted(found.taken | found.refused):
        print(f"{found.taken[kind]:4} taken {found.refused[kind]:4} refused  {kind}")
    print(f"/healthz took {found.slowest:.2f} s at most; {found.seconds:.0f} s in all; logs: {folder}")
    for problem in found.problems:
        print(problem)
    print(f"{len(found.problems)} problems")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
