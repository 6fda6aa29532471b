"""What a command says where ballast-lab is not installed, or cannot be loaded."""

import importlib.metadata

import pytest
from ballast_operator.cli.laboratory import SIMULATIONS, reproduce
from ballast_operator.cli.live.whatif import whatif
from ballast_operator.cli.simulate.command import simulate
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES
from click.testing import CliRunner

from tests.support.distributions import install


@pytest.fixture
def without_the_lab(monkeypatch):
    """Entry points as they are where ballast-lab is not installed."""
    real = importlib.metadata.entry_points

    def others(**query):
        return [entry for entry in real(**query) if entry.dist is None or entry.dist.name != "ballast-lab"]

    monkeypatch.setattr(importlib.metadata, "entry_points", others)
    for registry in (SIMULATIONS, ELASTIC_POLICIES):
        registry.rescan()
    yield
    for registry in (SIMULATIONS, ELASTIC_POLICIES):
        registry.rescan()


SMALL = ["--policy", "fifo", "--static", "3", "--cluster", "v100=8"]
COMMANDS = [
    (reproduce, ["gavel-5.9"], "ballast reproduce"),
    (simulate, ["--policy", "min-cost", "--static", "3", "--prices", "excerpt"], "--prices FOLDER"),
    (whatif, ["--policy", "min-cost", "--prices", "excerpt"], "--prices FOLDER"),
    (simulate, ["--policy", "sia", "--elastic", "jobs.json"], "--policy sia"),
    (simulate, [*SMALL, "--rules", "gavel"], "--rules gavel"),
    (simulate, [*SMALL, "--rules", "published"], "--rules published"),
    (simulate, [*SMALL, "--rules", "whole-rounds"], "--rules whole-rounds"),
    (simulate, [*SMALL, "--rules", "ballast", "--ideal"], "--ideal"),
    (simulate, [*SMALL, "--rules", "ballast", "--space-sharing"], "--space-sharing"),
    (simulate, [*SMALL, "--rules", "ballast", "--job-table", "published"], "--job-table published"),
]


@pytest.mark.parametrize(("command", "arguments", "option"), COMMANDS)
def test_the_error_names_the_distribution_and_how_to_install_it(command, arguments, option, without_the_lab):
    """One sentence with the option that asked for it, no traceback."""
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {option}: needs the Python distribution 'ballast-lab'")
    assert "To fix: pip install ballast-lab" in done.output


@pytest.mark.slow
def test_the_operators_own_rules_need_no_lab(without_the_lab):
    """The error of the default, Gavel's rules, names them."""
    assert "or choose --rules ballast" in CliRunner().invoke(simulate, SMALL).output
    assert CliRunner().invoke(simulate, [*SMALL, "--rules", "ballast", "--output", "json"]).exit_code == 0


def test_a_lab_that_cannot_be_loaded_is_named(without_the_lab, tmp_path, monkeypatch):
    """With the reason; the program does not end with a traceback."""
    install(tmp_path, "broken-lab", "ballast.simulations", {"lab.prices": "broken_lab:nothing"}, {})
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(*COMMANDS[1][:2])
    assert done.exit_code == 1
    assert "broken-lab" in done.output
    assert "cannot be loaded" in done.output
