"""Texts of pods, users and reports: whatever characters they have, the operator can write them."""

import asyncio
import contextlib

import pytest
from ballast_operator.api.costs.budgets import TeamPart
from ballast_operator.api.training_job_status import Decision, TrainingJobStatus
from ballast_operator.errors import Conflict
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import CONFIG_MAP, EVENT, JOB
from ballast_operator.observation.status_changes import status_content
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.operator.api.objects import JOB as TRANSLATOR
from tests.operator.api.objects import changed

pytestmark = pytest.mark.api

ANY = st.text(alphabet=st.characters(exclude_categories=()))
"""Any code points, halves of surrogate pairs among them."""

HARD = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA1), 0x2028, 0x2029, 0xD83E, 0xFEFF, 0xFFFE, 0xFFFF)))
"""What a YAML reader refuses or changes, and half a pair."""


def stored(text):
    """The text as the API server has it: of half a surrogate pair no reader makes a character."""
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)


@given(texts=st.lists(ANY, min_size=1, max_size=20))
@example(texts=["\U0001f917", HARD, "\U0010ffff", "\U0001fffe", "\u00e9" * 600, ": #\n - &a *a <<"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_is_written_and_read_back(control_plane, namespace, texts):
    """In an object that is applied, in a status, and in an Event."""
    asyncio.run(write_and_read(control_plane, namespace, texts))


async def write_and_read(control_plane, namespace, texts):
    name = {"namespace": namespace, "name": TRANSLATOR["metadata"]["name"]}
    want = [stored(text) for text in texts]
    async with await connect(str(control_plane.kubeconfig)) as cluster:
        data = {f"text-{number}": text for number, text in enumerate(texts)}
        config = {"metadata": {**name, "annotations": {"a": texts[0]}}, "data": data}
        answer = await cluster.apply(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", **config})
        assert answer["data"] == {key: stored(text) for key, text in data.items()}
        assert answer["metadata"]["annotations"] == {"a": want[0]}

        with contextlib.suppress(Conflict):
            await cluster.create(JOB, changed(TRANSLATOR, "metadata.namespace", namespace))
        teams = [text for text in dict.fromkeys(text[:253] for text in want) if text][:16]
        costs = tuple(TeamPart(team=team, cost=1.0) for team in teams)
        status = TrainingJobStatus(last_decision=Decision(why="".join(want)), team_costs=costs)
        body = {"apiVersion": JOB.api_version, "kind": JOB.kind, "metadata": name}
        answer = await cluster.write_status(JOB, {**body, "status": status_content(status)})
        assert answer["status"].get("lastDecision", {}).get("why", "") == "".join(want)
        assert [cost["team"] for cost in answer["status"].get("teamCosts", [])] == teams

        metadata = {"namespace": namespace, "generateName": "any-"}
        event = {"metadata": metadata, "involvedObject": {"kind": "TrainingJob", **name}, "reason": "Any"}
        answer = await cluster.create(EVENT, {**event, "message": "".join(texts)[:1024]})
        assert answer.get("message", "") == "".join(want)[:1024]
