"""What happens when a budget is spent or a deadline has passed."""

import enum


class OnLimit(enum.StrEnum):
    """What happens to a job that has reached a limit."""

    SUSPEND = "Suspend"
    """It saves a checkpoint, stops, and holds no GPUs until the limit is raised."""
    CONTINUE = "Continue"
    """It continues; the condition and an Event say that the limit is reached."""
    FAIL = "Fail"
    """It saves a checkpoint, stops, and has failed for good."""
