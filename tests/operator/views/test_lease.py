"""The trainer's messages as the operator keeps them, whatever is sent."""

import json

import pytest
from ballast_operator.views.lease import REFUSAL_SECONDS, LeaseReader

from tests.contract.examples import EXAMPLES

PREFIX = "ballast.dev/"


def lease(version: int, uid: str = "u", renewed: str = "", **annotations: str) -> dict:
    named = {PREFIX + name.replace("_", "-"): text for name, text in annotations.items()}
    metadata = {"uid": uid, "resourceVersion": str(version), "annotations": named}
    return {"metadata": metadata, "spec": {"renewTime": renewed}}


GOOD = {name: EXAMPLES[name].to_json() for name in ("report", "proposal", "ack")}


def test_every_message_is_read():
    """Report, proposal, acknowledgement and the last step, side by side."""
    view = LeaseReader().read(lease(1, **GOOD, finished_step="120", end_reason="enough"), now=0.0)
    assert view.refused == ""
    assert (view.report, view.proposal, view.ack) == tuple(EXAMPLES[name] for name in GOOD)
    assert (view.finished_step, view.end_reason) == (120, "enough")


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        ("report", "[" * 1100),
        ("report", json.dumps({**json.loads(GOOD["report"]), "stepsPerSecond": -1})),
        ("report", GOOD["report"].replace("3.5", "NaN")),
        ("report", "x" * 300_000),
        ("proposal", GOOD["proposal"].replace("0.525", "Infinity")),
        ("ack", '{"epoch":1e9999,"step":1}'),
        ("ack", '{"epoch":7,"step":' + "9" * 5000 + "}"),
        ("finished_step", "9" * 5000),
        ("finished_step", "-1"),
        ("end_reason", "x" * 5000),
        ("end_reason", ""),
    ],
)
def test_the_last_good_message_stays_in_force(annotation, text):
    """A refused one is named; it takes nothing away that was said before, also not of its own kind."""
    reader = LeaseReader()
    good = {**GOOD, "finished_step": "120"}
    before = reader.read(lease(1, **good), now=0.0)
    after = reader.read(lease(2, **{**good, annotation: text}), now=1.0)
    assert f"annotation {PREFIX}{annotation.replace('_', '-')}: " in after.refused
    assert (after.report, after.proposal, after.ack, after.finished_step) == (
        before.report,
        before.proposal,
        before.ack,
        before.finished_step,
    )


@pytest.mark.slow
def test_a_refusal_changes_once_in_a_while_whatever_is_sent():
    """A thousand different bad messages, good ones between them: one text, until a while after the last."""
    reader = LeaseReader()
    texts = set()
    for number in range(1000):
        bad = GOOD["report"] if number % 2 else json.dumps({"epoch": -number})
        texts.add(reader.read(lease(number, report=bad), now=float(number)).refused)
    assert len(texts) == 1
    assert reader.read(lease(1000, report=GOOD["report"]), now=1000.0).refused
    assert reader.read(lease(1001, report=GOOD["report"]), now=1000.0 + REFUSAL_SECONDS).refused == ""


def test_a_bad_message_that_stays_is_shown_as_long_as_it_stays():
    """Also from a trainer that has fallen silent."""
    reader = LeaseReader()
    for seconds in (0.0, 1000.0):
        assert reader.read(lease(1, report="[]"), now=seconds).refused


def test_another_lease_of_the_name_starts_over():
    """A job that was made again does not inherit what the first one's trainer said."""
    reader = LeaseReader()
    reader.read(lease(1, report=GOOD["report"], ack="[]", renewed="a"), now=0.0)
    view = reader.read(lease(2, uid="v", report="[]", renewed="a"), now=9.0)
    assert (view.report, view.quiet_seconds) == (None, 0.0)
    assert "report: " in view.refused and "ack: " not in view.refused


@pytest.mark.parametrize(
    ("spec", "released"),
    [
        ({}, False),
        ({"renewTime": "a"}, True),
        ({"renewTime": "a", "holderIdentity": ""}, True),
        ({"renewTime": "a", "holderIdentity": "job-1-0"}, False),
    ],
)
def test_a_lease_that_its_holder_has_renewed_and_holds_no_more_is_given_up(spec, released):
    """Nobody has held a new one yet."""
    assert LeaseReader().read({**lease(1), "spec": spec}, now=0.0).released is released


@pytest.mark.parametrize(
    ("stated", "lasts"), [(None, 60.0), (0, 60.0), (-5, 60.0), ("90", 60.0), (90, 90.0), (10**9, 600.0)]
)
def test_a_lease_lasts_as_long_as_it_says_up_to_ten_times_what_a_new_one_says(stated, lasts):
    """Its trainer was started with that."""
    view = LeaseReader().read({**lease(1), "spec": {"leaseDurationSeconds": stated}}, now=0.0)
    assert view.duration(60.0) == lasts


def test_a_message_that_is_taken_back_is_gone():
    """Only a message that cannot be read leaves the last one in force."""
    reader = LeaseReader()
    reader.read(lease(1, **GOOD), now=0.0)
    view = reader.read(lease(2), now=1.0)
    assert (view.report, view.proposal, view.ack) == (None, None, None)


def test_silence_is_counted_from_the_last_renewal_that_was_seen():
    """By the operator's own clock; other writes to the Lease are no renewals."""
    reader = LeaseReader()
    reader.read(lease(1, renewed="a"), now=0.0)
    assert reader.read(lease(2, renewed="a", report="[]"), now=5.0).quiet_seconds == 5.0
    assert reader.read(lease(3, renewed="b"), now=6.0).quiet_seconds == 0.0
