"""Gangs of real trainer processes, ended with their test."""

import functools
import itertools
import json

import pytest

from tests.support.gang import Gang, assert_same_curve


@pytest.fixture
def gang(tmp_path):
    """Start ``ballast-train run`` gangs: ``gang(config, ranks=...)``; ``folder`` is where the file lies."""
    started = []
    numbers = itertools.count()

    def start(config, *, ranks, options=(), folder=None, local=False):
        folder = folder or tmp_path / f"gang-{next(numbers)}"
        made = Gang.run(folder, config, ranks=ranks, options=options, local=local)
        started.append(made)
        return made

    yield start
    for made in started:
        made.close()


@pytest.fixture
def pods(tmp_path):
    """An empty gang for ``ballast-train pod`` processes."""
    made = Gang(tmp_path / "pods")
    made.folder.mkdir()
    yield made
    made.close()


@pytest.fixture(scope="session")
def single_process_losses(tmp_path_factory):
    """Losses by step of a configuration run unpartitioned, once per configuration."""

    @functools.cache
    def run(text):
        made = Gang.run(
            tmp_path_factory.mktemp("single"), json.loads(text), ranks=1, options=["--single-process"]
        )
        try:
            made.succeeded()
            return made.losses()
        finally:
            made.close()

    def losses(config):
        plain = {
            key: value for key, value in config.items() if key not in {"checkpoint", "repack", "rebalance"}
        }
        plain["pipeline"] = {
            k: v for k, v in config["pipeline"].items() if k not in {"schedule", "stagesPerRank"}
        }
        return run(json.dumps(plain, sort_keys=True))

    return losses


@pytest.fixture
def same_curve(single_process_losses):
    """Assert that a gang ends well, and has learnt as one process that has ``config``."""

    def check(running, config, name="rank-0"):
        running.succeeded()
        assert_same_curve(running.losses(name), single_process_losses(config))

    return check


@pytest.fixture
def small_config():
    """Makes a configuration of a small GPT with dropout: ``small_config(totalSteps=..., **fields)``."""

    def make(**fields):
        return {
            "totalSteps": 30,
            "model": {
                "name": "gpt",
                "layers": 8,
                "args": {"dim": 32, "heads": 2, "context": 16, "dropout": 0.1},
            },
            "pipeline": {"microbatches": 4, "globalBatchSize": 8},
            "rebalance": {"enabled": False},
            **fields,
        }

    return make
