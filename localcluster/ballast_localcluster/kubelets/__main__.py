"""``python -m ballast_localcluster.kubelets CONFIGURATION``: keep one node, or the network between them."""

import sys

from ballast_localcluster.kubelets.agent import main

if __name__ == "__main__":
    sys.exit(main())
