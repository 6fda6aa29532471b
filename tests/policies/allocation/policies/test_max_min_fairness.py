"""Max-min fairness is what the dissertation's section 5.4.1 says, solved exactly."""

import pytest
from ballast_policies.allocation.problem import Job, ProblemError


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"gpus": 0}, r"jobs\[a\].gpus"),
        ({"weight": 0.0}, r"jobs\[a\].weight"),
        ({"weight": float("nan")}, r"jobs\[a\].weight"),
        ({"throughput": {"v100": -1.0}}, r"jobs\[a\].throughput.v100"),
        ({"steps_remaining": -5.0}, r"jobs\[a\].steps_remaining"),
    ],
)
def test_an_impossible_job_is_refused_with_its_field(changes, want):
    """Field, value, reason."""
    with pytest.raises(ProblemError, match=want):
        Job(**({"name": "a", "throughput": {"v100": 1.0}} | changes))
