"""``python -m ballast_localcluster.setup``: build the control plane, unless it is there already."""

import sys

from ballast_localcluster.binaries import find_binaries
from ballast_localcluster.errors import BinariesError


def main() -> int:
    """Find or build the binaries; a failure is one message and exit code 1."""
    try:
        find_binaries()
    except BinariesError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
