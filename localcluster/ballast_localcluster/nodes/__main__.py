"""``python -m ballast_localcluster.nodes CONFIGURATION``: run a node agent."""

import sys

from ballast_localcluster.nodes.agent import main

if __name__ == "__main__":
    sys.exit(main())
