"""Text of pods and users on a terminal."""

import pytest
from ballast_operator.cli.live.explain import as_text
from ballast_operator.cli.option_names import printable
from ballast_operator.report.explanation import Explanation


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x1b]0;title\x07", "\r", "\x9b31m", "\u202e", "\x00"])
def test_a_message_cannot_write_to_the_terminal_but_its_letters(hostile):
    """Escape sequences, carriage returns and direction overrides are shown as U+FFFD."""
    shown = printable(f"loss is NaN{hostile}\nstep 3: größer als 1 €")
    assert shown.startswith("loss is NaN\N{REPLACEMENT CHARACTER}") and hostile not in shown
    assert shown.endswith("\nstep 3: größer als 1 €")


def test_explain_prints_no_escape_sequence_of_a_trainer():
    """Its answer is the trainer's own message."""
    found = Explanation(
        namespace="team",
        job="job",
        state="Failed",
        reason="UserError",
        answer="pod job-1-0 ended: \x1b[2J",
        allocation={},
        decision={},
        progress={},
        restarts={},
        pods=(),
        conditions=(),
        policy=(),
        events=("UserError: \x1b[31m",),
    )
    assert "\x1b" not in as_text(found)
