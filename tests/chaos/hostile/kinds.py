"""All kinds of hostile objects: a kind is a function of one of the modules imported here."""

from tests.chaos.hostile import job_kinds, other_kinds
from tests.chaos.hostile.author import KINDS

__all__ = ["KINDS", "job_kinds", "other_kinds"]
