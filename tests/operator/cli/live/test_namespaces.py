"""A namespace that does not exist is named, and no empty answer is given for it."""

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner

MISSING = "there is no namespace nowhere. To fix: kubectl create namespace nowhere"


@pytest.mark.api
@pytest.mark.parametrize("command", [("top", "--once"), ("explain", "job"), ("demo",)], ids=lambda c: c[0])
def test_a_namespace_that_does_not_exist_is_named(control_plane, command):
    """In each command that takes one; nothing is installed or started."""
    options = ["--kubeconfig", str(control_plane.kubeconfig), "--namespace", "nowhere"]
    done = CliRunner().invoke(main, [*command, *options])
    assert done.exit_code == 1
    assert MISSING in " ".join(done.output.split())
    assert "Traceback" not in done.output
