"""Whether a job may run on spot machines."""

import enum


class SpotUse(enum.StrEnum):
    """Whether a job may run on spot machines."""

    ALLOW = "Allow"
    """On spot machines and on others, as the policy decides."""
    FORBID = "Forbid"
    """Only on machines that stay."""
    REQUIRE = "Require"
    """Only on spot machines."""
