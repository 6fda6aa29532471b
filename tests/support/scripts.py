"""Python scripts in forks of a process that has what they import: a start takes no seconds of CPU."""

import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.gang import forks


def start_script(script: Path, environment: Mapping[str, str], *, folder: Path, errors: Path) -> BaseProcess:
    """``python SCRIPT`` with exactly this environment in ``folder``; standard error is appended to a file."""
    arguments = (os.fspath(script), dict(environment), os.fspath(folder), os.fspath(errors))
    process = forks().Process(target=_main, args=arguments)
    process.start()
    return process


def _main(script: str, environment: dict[str, str], folder: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv, sys.path[0] = [script], os.fspath(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
