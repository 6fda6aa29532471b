"""Gangs of trainer processes and their plans, shared with the tests.

Benchmarks run as scripts, with only their own folder on the path; ``tests`` is found from the root.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.support.gang import Gang
from tests.support.plans import local_plan
from tests.support.ports import free_port

__all__ = ["Gang", "free_port", "local_plan"]
