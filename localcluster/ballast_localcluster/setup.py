"""``python -m ballast_localcluster.setup``: build the control plane, unless it is there already.

The standard library is enough for it, so that ``make setup`` builds while Python packages are downloaded.
With ``--karpenter`` and ``--kubelets`` also what only the clusters that ask for it need.
"""

import argparse
import os
import signal
import sys

from ballast_localcluster.binaries import find_binaries
from ballast_localcluster.errors import BinariesError
from ballast_localcluster.supervision.processes import kill_marked

_MARK = "BALLAST_SETUP"


def main() -> int:
    """Find or build the binaries; a failure is one message and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m ballast_localcluster.setup", description=__doc__)
    parser.add_argument("--karpenter", action="store_true", help="build Karpenter, too")
    parser.add_argument("--kubelets", action="store_true", help="build kubelet, for real nodes, too")
    options = parser.parse_args()
    # Told to end, it ends the compiler, too, also one that is just starting.
    os.environ[_MARK] = str(os.getpid())

    def end(*_: object) -> None:
        kill_marked(f"{_MARK}={os.getpid()}")
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        find_binaries()
        # These import packages, which are there once they are asked for.
        if options.karpenter:
            from ballast_localcluster.karpenter.start import find_karpenter

            find_karpenter()
        if options.kubelets:
            from ballast_localcluster.kubelets.start import find_kubelets

            find_kubelets()
    except BinariesError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
