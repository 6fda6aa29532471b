"""Modules of the user's own beside which a command is started."""

import sys
from pathlib import Path


def import_from_here(policy: str) -> None:
    """For ``module:function``: let modules of the working folder be found, as ``python -m`` does."""
    here = str(Path.cwd())
    if ":" in policy and here not in sys.path:
        sys.path.insert(0, here)
