"""Import of the user's modules in the working directory."""

import sys
from pathlib import Path


def import_from_here(policy: str) -> None:
    """Let ``module:function`` name modules in the working directory, as ``python -m`` does."""
    here = str(Path.cwd())
    if ":" in policy and here not in sys.path:
        sys.path.insert(0, here)
