"""Why a launch of a job ended, under the name that the API's models use."""

from ballast_policies.protocol.cause import Cause

__all__ = ["Cause"]
