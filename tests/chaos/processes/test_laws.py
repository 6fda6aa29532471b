"""The laws of an episode notice what breaks them."""

import json
import types

import pytest

from tests.chaos.processes.jobs import PATH, Job
from tests.chaos.processes.laws import Laws


class Made:
    """An episode whose API server says what the test wants."""

    def __init__(self, folder, pods=(), state="Running", log=""):
        job = Job("single", 0, 4, folder)
        job.diaries.mkdir(parents=True)
        (folder / "operator.log").write_text(log)
        self.jobs = {job.name: job}
        self.job, self._pods, self._state = job, pods, state
        self.cluster = types.SimpleNamespace(items=self._items, log=lambda replica: folder / "operator.log")

    def _items(self, path):
        return [] if path == PATH else list(self._pods)

    def states(self):
        return dict.fromkeys(self.jobs, self._state)

    def diary(self, launch, *lines):
        """Steps and times of one process."""
        text = "".join(json.dumps({"step": step, "time": time}) + "\n" for step, time in lines)
        (self.job.diaries / f"{self.job.name}-{launch}-0.99.jsonl").write_text(text)


def pod(name, node, gpus, launch):
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    labels = {"ballast.dev/job": name, "ballast.dev/launch": str(launch)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [limits]},
        "status": {"phase": "Running"},
    }


WHOLE = [(step, 10.0 + step) for step in range(4)]


def looked(episode):
    laws = Laws(episode)
    laws.look()
    laws.look_back()
    return laws.problems


def test_an_orderly_episode_breaks_no_law(tmp_path):
    """A launch after the other, each step done, GPUs enough."""
    episode = Made(tmp_path, [pod("single-0", "fast-0", 2, 1), pod("other", "fast-1", 2, 1)])
    episode.diary(1, *WHOLE[:3])
    episode.diary(2, (2, 20.0), (3, 21.0))
    assert looked(episode) == []


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([pod("single-0", "fast-0", 1, 1), pod("other", "fast-0", 2, 1)], "over capacity: fast-0 has 2 GPUs"),
        ([pod("single-0", "fast-0", 1, 1), pod("single-0", "fast-1", 1, 2)], "alive at once: launches"),
    ],
)
def test_pods_that_must_not_be_there_are_noticed(tmp_path, pods, words):
    """Whatever the operator says of them."""
    episode = Made(tmp_path, pods)
    episode.diary(1, *WHOLE)
    assert [words in problem for problem in looked(episode)] == [True]


@pytest.mark.parametrize("state", ["Failed", "missing"])
def test_a_lost_job_is_noticed(tmp_path, state):
    """No fault of an episode may end a job."""
    episode = Made(tmp_path, state=state)
    episode.diary(1, *WHOLE)
    assert looked(episode) == [f"lost: single-0 is {state}"]


def test_a_bug_in_the_operators_log_is_noticed(tmp_path):
    """A loop that was started again ended without a plan."""
    episode = Made(tmp_path, log="x failed; it is started again in 1 s\nTraceback (most recent call last):\n")
    episode.diary(1, *WHOLE)
    assert [problem.startswith("a bug: operator-") for problem in looked(episode)] == [True, True]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (WHOLE[:3], [(0, 20.0), (1, 21.0), (2, 22.0), (3, 23.0)], "lost steps: launch 2"),
        (WHOLE[:3], [(2, 10.5), (3, 21.0)], "alive at once: launch 2"),
        (WHOLE[:1], [(3, 20.0)], "left out: launch 2"),
    ],
)
def test_steps_that_are_done_twice_or_never_are_noticed(tmp_path, first, second, words):
    """By what the trainers' processes have noted: from a checkpoint of step 2 on disk since second 12."""
    episode = Made(tmp_path)
    episode.diary(1, *first)
    episode.diary(2, *second)
    laws = Laws(episode)
    laws._saved["single-0"] = [(12.0, 2)]
    laws.look_back()
    assert words in laws.problems[0]
