"""Commands on jobs of a live cluster."""

from ballast_operator.api.conditions import JobState
from ballast_operator.cli.live.jobs import STATES


def test_states_that_can_be_asked_for_are_those_of_a_jobs_status():
    """And New, of a job that no operator has seen; named apart, as the API's models take long to import."""
    assert ("New", *JobState) == STATES
