"""Settings from the environment, and metrics with bounded labels."""

from types import SimpleNamespace

import pytest
from ballast_operator.allocator.gauges import set_job_gauges
from ballast_operator.api.conditions import JobState
from ballast_operator.metrics import Metrics, replace_series
from ballast_operator.settings import from_environment


def test_a_setting_is_taken_from_the_environment():
    """BALLAST_<GROUP>_<FIELD>, in seconds; the others keep their defaults."""
    settings = from_environment({"BALLAST_JOB_BIND_SECONDS": "30", "PATH": "/bin"})
    assert settings.job.bind_seconds == 30.0
    assert settings.job.heartbeat_seconds == 60.0


@pytest.mark.parametrize(
    ("name", "value", "want_words"),
    [
        ("BALLAST_JOB_BIND_SECONDS", "soon", "expected seconds"),
        ("BALLAST_JOB_BIND_SECONDS", "-1", "more than 0"),
        ("BALLAST_JOB_HEARTBEAT_SECONDS", "inf", "expected seconds"),
        ("BALLAST_JOB_HEARTBEAT_SECONDS", "1e10", "at most 1e+09"),
        ("BALLAST_JOB_BINDING_SECONDS", "3", "To fix: use one of"),
        ("BALLAST_JOB_HEARTBEAT_SECONDS", "30", "To fix: at least 40"),
        ("BALLAST_LEADER_RENEW_SECONDS", "4.5", "To fix: less than BALLAST_LEADER_FENCE_SECONDS, 4.5"),
        ("BALLAST_LEADER_FENCE_SECONDS", "6", "To fix: less than BALLAST_LEADER_LEASE_SECONDS, 6"),
        ("BALLAST_LEADER_LEASE_SECONDS", "601", "To fix: at most 600"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(name, value, want_words):
    """The message has the variable, its value and what to change."""
    with pytest.raises(ValueError, match=name) as error:
        from_environment({name: value})
    assert want_words in str(error.value)


def test_no_metric_is_labelled_by_job_pod_or_namespace():
    """The number of series is bounded by pools, teams, states and causes, not by jobs."""
    labels = {
        label
        for metric in vars(Metrics()).values()
        if hasattr(metric, "_labelnames")
        for label in metric._labelnames
    }
    assert labels == {
        "state",
        "pool",
        "gpu_type",
        "policy",
        "reason",
        "cause",
        "verb",
        "kind",
        "task",
        "part",
        "team",
        "period",
        "use",
    }


def test_a_scrape_while_a_gauge_is_set_misses_no_series_that_stays():
    """``/metrics`` is served by another thread; what is not named any more is gone afterwards."""
    gauge, seen = Metrics().gpus_shared, []

    def series():
        return {
            sample.labels["pool"]: sample.value for family in gauge.collect() for sample in family.samples
        }

    class Scraped(dict):
        def items(self):
            for item in super().items():
                seen.append(series())
                yield item

    replace_series(gauge, {("goes",): 1, ("stays",): 2})
    replace_series(gauge, Scraped({("new",): 4, ("stays",): 3}))
    assert [scraped["stays"] for scraped in seen] == [2, 2]
    assert series() == {"stays": 3, "new": 4}


def test_jobs_are_counted_by_looking_at_each_status_once():
    """They are counted every few seconds, thousands of them."""
    looked = []

    class Status:
        def __init__(self, state, reason):
            self.state, self.reason = state, reason

        @property
        def summary_state(self):
            looked.append(self)
            return self.state

        def condition(self, kind):
            return SimpleNamespace(reason=self.reason) if kind == "Admitted" and self.reason else None

    statuses = [
        *(Status(JobState.WAITING, "Queued") for _ in range(5)),
        Status(JobState.WAITING, ""),
        Status(JobState.RUNNING, "Assigned"),
        Status(JobState.SUCCEEDED, "Done"),
        Status(JobState.FAILED, "UserError"),
    ]
    metrics = Metrics()
    assert set_job_gauges(metrics, [SimpleNamespace(status=status) for status in statuses]) == 7
    assert looked == statuses

    def value(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    assert value("ballast_jobs", state="Waiting") == 6 and value("ballast_jobs", state="Running") == 1
    assert value("ballast_jobs_waiting", reason="Queued") == 5
    assert value("ballast_jobs_waiting", reason="WaitingForCapacity") == 0
    assert value("ballast_jobs_waiting", reason="Assigned") is None
