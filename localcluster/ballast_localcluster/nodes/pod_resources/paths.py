"""Container paths and real paths.

A process node has no mount namespace: a volume that a container mounts at ``/config`` is a directory of
the pod's folder.  So wherever the container's path stands in a command, an argument, a literal environment
value or the working directory, the real one is put in its place; the trainer and most programs take their
paths from there.  A path that is fixed inside a program is not found; such a program reads
``BALLAST_MOUNT_<VOLUME>`` instead.
"""

import re
from collections.abc import Mapping
from pathlib import Path

_PATH_CHARACTERS = r"[A-Za-z0-9_.\-]"


def translate(text: str, mounts: Mapping[str, Path]) -> str:
    """Put real paths for container paths.

    A container path counts where it is whole: at the beginning or after a character that no path has (so
    ``/data`` is not found in ``/my/data``), and up to the end, a ``/``, or such a character (not in
    ``/database``).  The longest fitting mount wins.

    Args:
        text: a command, an argument, a value.
        mounts: container path -> real path.
    """
    paths = sorted((path.rstrip("/") for path in mounts if path != "/"), key=len, reverse=True)
    if not paths:
        return text
    real = {path.rstrip("/"): str(target) for path, target in mounts.items()}
    pattern = (
        rf"(?<!{_PATH_CHARACTERS})(?<!/)({'|'.join(re.escape(path) for path in paths)})"
        rf"(?=/|$|(?!{_PATH_CHARACTERS}))"
    )
    return re.sub(pattern, lambda match: real[match[1]], text)


def mount_variable(volume: str) -> str:
    """Name of the environment variable that holds the real directory of a mounted volume."""
    return "BALLAST_MOUNT_" + re.sub(r"[^A-Z0-9]", "_", volume.upper())
