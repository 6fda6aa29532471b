"""Gangs of trainer processes and their plans, shared with the tests.

Benchmarks run as scripts, with only their own folder on the path; ``tests`` is found from the root.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.support.gang import Gang, free_port
from tests.support.plans import local_plan

__all__ = ["Gang", "free_port", "local_plan"]
