"""Texts of pods, users and reports: whatever characters they have, the operator can write them."""

import asyncio
import contextlib
import functools
import json
from unittest import mock

import pytest
from ballast_operator.allocator.policy_status import PolicyReport, policy_status
from ballast_operator.allocator.solver import Solve
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.api.costs import TeamPart
from ballast_operator.api.training_job_status import Decision, TrainingJobStatus, status_content
from ballast_operator.errors import Conflict, Rejected
from ballast_operator.kube.client import DroppedFields, connect
from ballast_operator.kube.kinds import CONFIG_MAP, EVENT, JOB, LEASE, POD, POLICY
from ballast_policies.allocation.registry import allocate
from ballast_policies.contract.messages import END_REASON_ANNOTATION, REPORT_ANNOTATION
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.operator.api.objects import JOB as TRANSLATOR
from tests.operator.api.objects import POLICY as AN_EXAMPLE
from tests.operator.api.objects import changed
from tests.operator.loops.simulated.simulation import NAMESPACE, START, InProcessSolver, Simulation

pytestmark = [pytest.mark.api, pytest.mark.slow]

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
        said = await refusal_of_pod(cluster, namespace, texts)
        teams = [text for text in dict.fromkeys(text[:253] for text in want) if text][:16]
        costs = tuple(TeamPart(team=team, cost=1.0) for team in teams)
        status = TrainingJobStatus(last_decision=Decision(why="".join(want), chosen=said), team_costs=costs)
        body = {"apiVersion": JOB.api_version, "kind": JOB.kind, "metadata": name}
        answer = await cluster.write_status(JOB, {**body, "status": status_content(status)})
        assert answer["status"].get("lastDecision", {}).get("why", "") == "".join(want)
        assert answer["status"].get("lastDecision", {}).get("chosen", "") == said
        assert [cost["team"] for cost in answer["status"].get("teamCosts", [])] == teams

        metadata = {"namespace": namespace, "generateName": "any-"}
        event = {"metadata": metadata, "involvedObject": {"kind": "TrainingJob", **name}, "reason": "Any"}
        answer = await cluster.create(EVENT, {**event, "message": "".join(texts)[:1024]})
        assert answer.get("message", "") == "".join(want)[:1024]


async def refusal_of_pod(cluster, namespace, texts):
    """What the API server says of a pod with the texts as command and label; empty: it takes it."""
    metadata = {"namespace": namespace, "name": "asked", "labels": {"label": texts[0]}}
    container = {"name": "c", "image": "none", "command": texts}
    try:
        await cluster.try_create(POD, {"metadata": metadata, "spec": {"containers": [container]}})
    except Rejected as error:
        return str(error)[:4096]
    return ""


SENT = ANY.map(stored)
"""A text as it reaches the operator: the API server has no halves."""

WORDS = SENT | st.builds(lambda text: json.dumps({"reason": "Failed", "message": text, "step": 3}), ANY)
"""Last words of a pod: any, and those of a trainer, which may have halves as JSON's escapes."""


@given(words=WORDS, entity=SENT.filter(bool), report=SENT | ANY.map(json.dumps), end=SENT)
@example(words="\U0001f917" * 1000, entity="\U0001f917", report="[" + HARD * 200, end="\0" * 9000)
@example(words='{"reason": "Failed", "message": "\\ud83e", "step": 3}', entity=" ", report="{", end="")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_a_job_and_its_pods_say_it_ends(control_plane, namespace, words, entity, report, end):
    """Its last words, team, report and reason for the end: it fails, and a real API server takes that."""
    status = asyncio.run(failed_job(words, entity, report, end))
    assert status["conditions"] == asyncio.run(written(control_plane, namespace, status))["conditions"]


async def failed_job(words, entity, report, end):
    """The status of a job with these texts once it has failed, in a cluster in memory."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    await simulation.run_job("one", backoffLimit=0, entity=entity[:253], trainer={"total": 10**6})
    annotations = {REPORT_ANNOTATION: report, END_REASON_ANNOTATION: end}
    simulation.world.patch(LEASE, NAMESPACE, "one", {"metadata": {"annotations": annotations}})
    await simulation.tick()
    (pod, *_) = simulation.pods("one")
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}
    pod_status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": ended}]}
    simulation.world.patch(POD, NAMESPACE, pod["metadata"]["name"], {"status": pod_status})
    await simulation.until(lambda: simulation.state("one") == "Failed")
    return status_content(simulation.status("one"))


async def written(control_plane, namespace, status):
    """The status as a real API server has it."""
    async with await connect(str(control_plane.kubeconfig)) as cluster:
        with contextlib.suppress(Conflict):
            await cluster.create(JOB, changed(TRANSLATOR, "metadata.namespace", namespace))
        name = {"namespace": namespace, "name": TRANSLATOR["metadata"]["name"]}
        return (await cluster.write_status(JOB, {"metadata": name, "status": status}))["status"]


@given(team=SENT.filter(bool), feed=SENT | ANY.map(json.dumps), said=ANY)
@example(team="\U0001f917" * 253, feed='{"pricePerGpuHour": "\\ud83e"}', said=HARD * 200)
@example(team=" ", feed="\0" * 9000, said="\U0001f917")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_a_policy_its_teams_and_its_prices_are_called_its_status_is_written(
    control_plane, namespace, team, feed, said
):
    """A team with costs, a price feed's text, a solver's error, a wrong field, a decision that fails."""
    for status in asyncio.run(policy_statuses(team[:253], feed, said)):
        stored_status = asyncio.run(written_of_policy(control_plane, namespace, status))
        assert stored_status == json.loads(json.dumps(status)), status


async def policy_statuses(team, feed, said):
    """Of a ClusterPolicy with these texts once a job of the team has run, in a cluster in memory."""
    pools = {"fast": {"pricePerGpuHour": 3.0, "priceFeed": {"configMap": "prices"}}}
    objective, budgets = {"policy": "hierarchical", "entities": {team: {}}}, {team: {"amount": 1e6}}
    nodes = {"fast-0": ("fast", 2)}
    simulation = Simulation(nodes=nodes, pools=pools, objective=objective, budgets=budgets)
    prices = {"metadata": {"namespace": "ballast-system", "name": "prices"}, "data": {"fast": feed}}
    simulation.world.put(CONFIG_MAP, prices)
    with mock.patch.object(InProcessSolver, "solve", functools.partialmethod(failing, said)):
        await simulation.run_job("one", entity=team, trainer={"total": 10**6})
        simulation.asked = True
        await simulation.tick(seconds=60.0)
    item = simulation.policy()
    assert {each["team"] for each in item["status"]["teams"]} == {team}
    simulation.change_policy(objective={**objective, "policy": stored(said[:253])})
    simulation.asked = True
    await simulation.tick()
    failed, _ = policy_status(
        item, PolicyReport(failed=f"ValueError: {said}"), now=START, dropped=DroppedFields()
    )
    assert failed is not None
    return item["status"], simulation.policy()["status"], failed["status"]


async def failing(solver, said, policy, problem, **how):
    """The answer in place of a solver's that has said so."""
    reasons = {"outcome": PolicyReason.FALLBACK_AFTER_SOLVER_ERROR, "health": PolicyReason.SOLVER_DIED}
    return Solve(allocation=allocate(policy, problem, **how["options"]), message=said, seconds=0.0, **reasons)


async def written_of_policy(control_plane, namespace, status):
    """The status as a real API server has it."""
    async with await connect(str(control_plane.kubeconfig)) as cluster:
        name = {"name": f"of-{namespace}"}
        made = await cluster.create(POLICY, {**AN_EXAMPLE, "metadata": name})
        try:
            return (await cluster.write_status(POLICY, {"metadata": name, "status": status}))["status"]
        finally:
            await cluster.delete(POLICY, "", name["name"], uid=made["metadata"]["uid"])
