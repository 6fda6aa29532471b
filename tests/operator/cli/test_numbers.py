"""Numbers that are none, as options of commands that wait for or look ahead so long."""

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    "command",
    [["top", "--every"], ["whatif", "--over-time"], ["operator", "--history-days"]],
    ids=lambda c: c[0],
)
def test_what_is_no_finite_number_is_refused_before_anything_is_done(command, number):
    """With the option's name and no traceback."""
    result = CliRunner().invoke(main, [*command, number])
    assert result.exit_code == 2
    assert command[1] in result.output and "Traceback" not in result.output
