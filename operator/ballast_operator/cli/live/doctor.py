"""``ballast doctor``: what of a cluster keeps Ballast from working, and what to do about it."""

import asyncio
import dataclasses
import datetime
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.api.conditions import some_of
from ballast_operator.cli.live.connection import cluster_errors, kubeconfig_option, namespace_option
from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast.client import AsyncClient

    from ballast_operator.api.node_pool import NodePool

OLDEST = (1, 30)
"""Kubernetes; the chart's kubeVersion."""

DEPLOYMENT = "app.kubernetes.io/part-of=ballast,app.kubernetes.io/component=operator"
"""Labels of the operator's Deployment, whatever the release is called."""
SERVICE_ACCOUNT = "ballast-operator"
"""The operator's where it has no Deployment, as under `ballast up`."""
_AT_ONCE = 8
_MEETING_SECONDS = 120.0
"""Ranks that import torch and load a checkpoint meet within it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        status: ok, warning, failed, or skipped where the account may not look.
        message: what was found.
        fix: what to do; empty: nothing.
    """

    check: str
    status: str
    message: str
    fix: str = ""


@click.command()
@namespace_option("Where the operator runs.", "ballast-system")
@kubeconfig_option
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(namespace: str, kubeconfig: str | None, output: str) -> None:
    """Check what Ballast needs of the cluster: a line each, with what to do. Exit code 1: one failed."""
    with cluster_errors():
        found = asyncio.run(examine(kubeconfig, namespace))
    if output == "json":
        click.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        for one in found:
            fix = f" To fix: {one.fix}" if one.fix else ""
            click.echo(printable(f"{one.status:8} {one.check}: {one.message}.{fix}".replace("\n", " ")))
    skipped = list(dict.fromkeys(one.check for one in found if one.status == "skipped"))
    if skipped:
        text = f"skipped {len(skipped)} of {len(CHECKS)} checks, where faults may be: {', '.join(skipped)}"
        click.echo(text, err=True)
    if any(one.status == "failed" for one in found):
        raise SystemExit(1)


async def examine(kubeconfig: str | None, namespace: str) -> list[Finding]:
    """The findings of every check. Raises BallastError: the API server cannot be reached at all."""
    from ballast.client import AsyncClient, BallastError, Forbidden

    found: list[Finding] = []
    async with AsyncClient(kubeconfig, namespace=namespace) as client:
        await client.connection.request("get", "/version")
        for name, check in CHECKS.items():
            try:
                found += await check(client)
            except Forbidden as error:
                found.append(_unknown(name, error))
            except BallastError as error:
                found.append(Finding(name, "failed", str(error)))
    return found


def _unknown(check: str, error: Exception) -> Finding:
    return Finding(check, "skipped", f"your account may not look: {error}")


async def _items(client: "AsyncClient", path: str, **query: str) -> list[Any]:
    return [item async for item in client.connection.items(path, query)]


async def _jobs(client: "AsyncClient") -> list[Any]:
    """The operator's jobs that have not ended."""
    from ballast_operator.kube.kinds import is_ours

    return [
        job
        for job in await _items(client, "/apis/ballast.dev/v1alpha1/trainingjobs")
        if is_ours(job) and (job.get("status") or {}).get("state") not in ("Succeeded", "Failed")
    ]


def _name(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


async def _kubernetes(client: "AsyncClient") -> list[Finding]:
    said = str((await client.connection.request("get", "/version")).get("gitVersion"))
    number = re.match(r"v?(\d+)\.(\d+)", said)
    oldest = ".".join(map(str, OLDEST))
    if number is None or tuple(map(int, number.groups())) < OLDEST:
        return [Finding("kubernetes", "failed", f"the API server is {said}", f"{oldest} or later")]
    return [Finding("kubernetes", "ok", f"the API server is {said}, {oldest} or later is needed")]


async def _clock(client: "AsyncClient") -> list[Finding]:
    """Clocks of this machine, and of nodes that are ahead: a node writes the time into its Lease."""
    from ballast.client import Forbidden

    from ballast_operator.views.clock import MOST_SKEW_SECONDS, http_date, skew

    before = time.time()
    await client.connection.request("get", "/version")
    after = time.time()
    server = http_date(client.connection.date)
    if server is None:
        return [Finding("clock", "skipped", "the API server does not say its time")]
    found = []
    ahead = skew(before, server.timestamp(), after)
    if abs(ahead) > MOST_SKEW_SECONDS:
        text = f"this machine's clock is {ahead:+.0f} s from the API server's"
        found.append(Finding("clock", "warning", text, "synchronise it (NTP)"))
    try:
        leases = await _items(client, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases")
    except Forbidden as error:
        return [*found, _unknown("clock", error)]
    await client.connection.request("get", "/version")
    server = http_date(client.connection.date) or server
    nodes = [
        f"{_name(lease)} by {seconds:.0f} s"
        for lease in leases
        if (seconds := -_age(lease["spec"].get("renewTime"), server)) > MOST_SKEW_SECONDS
    ]
    if nodes:
        text = f"clocks of nodes are ahead of the API server's: {some_of(nodes)}"
        found.append(Finding("clock", "failed", text, "synchronise them (NTP)"))
    return found or [
        Finding("clock", "ok", f"this machine and {len(leases)} nodes agree with the API server")
    ]


def _age(stamp: Any, now: datetime.datetime) -> float:
    """Seconds since an RFC 3339 time; 0 where it is none."""
    from ballast_operator.views.clock import parsed

    at = parsed(stamp)
    return 0.0 if at is None else (now - at).total_seconds()


async def _definitions(client: "AsyncClient") -> list[Finding]:
    from ballast.client import NotFound

    from ballast_operator.api.schema.crd import custom_resource_definitions

    found = []
    fix = "`ballast crds --output-dir - | kubectl apply --server-side -f -`"
    for wanted in custom_resource_definitions():
        name = wanted["metadata"]["name"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        try:
            there = await client.connection.request("get", path)
        except NotFound:
            found.append(Finding("definitions", "failed", f"{name} is not installed", fix))
            continue
        lacks = sorted(_fields(wanted) - _fields(there))
        if lacks:
            text = f"{name} is of another release than this program: it lacks {some_of(lacks)}"
            found.append(Finding("definitions", "failed", text, fix))
        elif more := sorted(_fields(there) - _fields(wanted)):
            text = f"{name} is newer than this program: it has {some_of(more)}"
            found.append(
                Finding("definitions", "warning", text, "install the cluster's release of Ballast here")
            )
    return found or [Finding("definitions", "ok", "the custom resource definitions are of this release")]


def _fields(definition: Mapping[str, Any]) -> set[str]:
    """``version: path`` of each field."""

    def below(schema: Any, path: str) -> Iterator[str]:
        for key, part in (schema.get("properties") or {}).items():
            yield f"{path}.{key}"
            yield from below(part, f"{path}.{key}")
        if isinstance(schema.get("items"), Mapping):
            yield from below(schema["items"], f"{path}[]")

    return {
        f"{version['name']}: {path[1:]}"
        for version in definition["spec"]["versions"]
        if version.get("served")
        for path in below(version["schema"]["openAPIV3Schema"], "")
    }


async def _operator(client: "AsyncClient") -> list[Finding]:
    from ballast.client import Forbidden, NotFound

    from ballast_operator.api.meta import LEADER_LEASE

    where, fix = client.namespace, "install the chart (docs/install.md), or give --namespace"
    path = "/apis/coordination.k8s.io/v1/"
    found: list[Finding] = []
    try:
        lease = await client.connection.request("get", f"{path}namespaces/{where}/leases/{LEADER_LEASE}")
    except NotFound:
        found.append(Finding("operator", "failed", f"no operator has led in namespace {where}", fix))
    else:
        holder, age = _leader(client, lease)
        pods = f"kubectl --namespace {where} get pods, and their logs"
        text = f"no operator leads; the Lease was renewed {age:.0f} s ago"
        found.append(
            Finding("operator", "ok", f"{holder} leads")
            if holder
            else Finding("operator", "failed", text, pods)
        )
    try:
        there = await _items(client, f"{path}leases", fieldSelector=f"metadata.name={LEADER_LEASE}")
    except Forbidden:
        return found  # of other namespaces this account does not know
    others = {lease["metadata"]["namespace"] for lease in there if _leader(client, lease)[0]} - {where}
    if others:
        text = f"an operator leads in namespace {some_of(sorted(others))}, too: two give the same GPUs away"
        fix = "uninstall one, or let each look after a namespace (watchNamespace) and nodes of its own"
        found.append(Finding("operator", "warning", text, fix))
    return found


def _leader(client: "AsyncClient", lease: Mapping[str, Any]) -> tuple[str, float]:
    """Holder of a leader's Lease, empty: nobody, and the seconds since it was renewed."""
    from ballast_operator.views.clock import http_date

    spec = lease.get("spec") or {}
    now = http_date(client.connection.date) or datetime.datetime.now(datetime.UTC)
    age, lasts = _age(spec.get("renewTime"), now), float(spec.get("leaseDurationSeconds") or 15)
    return "" if age > 2 * lasts else str(spec.get("holderIdentity") or ""), age


async def _policies(client: "AsyncClient") -> list[Finding]:
    items = await _items(client, "/apis/ballast.dev/v1alpha1/clusterpolicies")
    if not items:
        return [Finding("policy", "failed", "there is no ClusterPolicy, so no job gets GPUs", "create one")]
    found = []
    for item in items:
        rows = (item.get("status") or {}).get("conditions") or []
        conditions = {row.get("type"): row for row in rows}
        for kind, bad in (("Valid", "failed"), ("Ready", "failed"), ("SolverHealthy", "warning")):
            row = conditions.get(kind)
            if row is None and kind == "Ready":
                found.append(Finding("policy", "failed", f"{_name(item)}: no operator has looked at it"))
            elif row is not None and row.get("status") == "False":
                found.append(Finding("policy", bad, f"{_name(item)}: {kind} is False: {row.get('message')}"))
    return found or [Finding("policy", "ok", f"{some_of([_name(item) for item in items])} is in force")]


async def _nodes(client: "AsyncClient") -> list[Finding]:
    from ballast.client import Forbidden

    from ballast_operator.api.read import InvalidObject, read_cluster_policy
    from ballast_operator.views.nodes import foreign_use, orphans, own_use

    nodes = await _items(client, "/api/v1/nodes")
    pools: list[NodePool] = []
    for item in await _items(client, "/apis/ballast.dev/v1alpha1/clusterpolicies"):
        try:
            policy = read_cluster_policy(
                {**item, "kind": "ClusterPolicy", "apiVersion": "ballast.dev/v1alpha1"}
            )
        except InvalidObject:
            continue  # its condition says so
        pools += policy.spec.node_pools
    found, seen, pods = [], set[str](), list[Any]()
    try:
        pods = await _items(client, "/api/v1/pods")
    except Forbidden as error:
        found.append(_unknown("nodes", error))
    if left := orphans(pods, (pool.gpu_resource for pool in pools)):
        text = f"pods of jobs that were deleted without them hold GPUs: {some_of(left)}"
        found.append(Finding("nodes", "warning", text, "delete them"))
    for pool in pools:
        selector = pool.node_selector or {}
        there = [node for node in nodes if selector.items() <= (node["metadata"].get("labels") or {}).items()]
        seen.update(map(_name, there))
        without = [_name(node) for node in there if not _gpus(node, pool.gpu_resource)]
        if not there and pool.max_nodes is None:
            labels = ", ".join(f"{key}={value}" for key, value in selector.items())
            text = f"no node is in pool {pool.name}: none has the labels {labels}"
            found.append(Finding("nodes", "failed", text, "label the nodes, or correct nodeSelector"))
        if without:
            text = f"nodes of pool {pool.name} offer no {pool.gpu_resource}: {some_of(without)}"
            found.append(Finding("nodes", "failed", text, "see whether the device plugin runs there"))
        resource = pool.gpu_resource
        held = foreign_use(pods, resource) + own_use(pods, {}, resource, but=("", ""))
        if shrunk := [
            f"{_name(node)} ({held[_name(node)]} of {gpus})"
            for node in there
            if 0 < (gpus := _gpus(node, resource)) < held[_name(node)]
        ]:
            text = f"pods hold more GPUs than nodes of pool {pool.name} offer: {some_of(shrunk)}"
            found.append(Finding("nodes", "warning", text, "repair their GPUs, or move the jobs"))
    others = [_name(node) for node in nodes if _name(node) not in seen and _gpus(node, "nvidia.com/gpu")]
    if others:
        text = f"nodes with GPUs are in no pool: {some_of(others)}"
        found.append(Finding("nodes", "warning", text, "add a pool for their labels to the ClusterPolicy"))
    if not pools:
        return [Finding("nodes", "skipped", "no ClusterPolicy that can be read names pools")]
    return found or [Finding("nodes", "ok", f"{len(seen)} nodes in {len(pools)} pools offer their GPUs")]


def _gpus(node: Mapping[str, Any], resource: str) -> int:
    count = str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0"))
    return int(count) if count.isdecimal() and len(count) < 6 else 0


async def _operators_rights(client: "AsyncClient") -> list[Finding]:
    from ballast_operator.api.rbac import operator_rules

    path = f"/apis/apps/v1/namespaces/{client.namespace}/deployments"
    pods = [one["spec"]["template"]["spec"] for one in await _items(client, path, labelSelector=DEPLOYMENT)]
    account = next((pod.get("serviceAccountName", "default") for pod in pods), SERVICE_ACCOUNT)
    user = f"system:serviceaccount:{client.namespace}:{account}"
    asked = [
        {"group": group, "resource": resource, "subresource": sub, "verb": verb}
        for rule in operator_rules()
        for group in rule["apiGroups"]
        for resource, _, sub in (name.partition("/") for name in rule["resources"])
        for verb in rule["verbs"]
    ]
    lacks = await _lacking(client, "subjectaccessreviews", {"user": user}, asked)
    if lacks:
        fix = "install the chart's ClusterRole, or apply it again"
        return [Finding("operator's rights", "failed", f"{account} may not {some_of(lacks)}", fix)]
    return [Finding("operator's rights", "ok", f"{account} may do all that it needs")]


async def _own_rights(client: "AsyncClient") -> list[Finding]:
    jobs = {"group": "ballast.dev", "resource": "trainingjobs", "subresource": "", "namespace": "default"}
    logs = {"group": "", "resource": "pods", "subresource": "log", "verb": "get", "namespace": "default"}
    asked = [*({**jobs, "verb": verb} for verb in ("create", "get", "list", "patch", "delete")), logs]
    lacks = await _lacking(client, "selfsubjectaccessreviews", {}, asked)
    if lacks:
        fix = "have the ClusterRole edit, which has ballast-editor's rights, bound to you where you train"
        return [Finding("your rights", "warning", f"in namespace default you may not {some_of(lacks)}", fix)]
    return [Finding("your rights", "ok", "you may submit jobs and read their logs in namespace default")]


async def _lacking(
    client: "AsyncClient", kind: str, who: Mapping[str, str], asked: Sequence[Mapping[str, str]]
) -> list[str]:
    """Rights that are missing, as text."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def allowed(right: Mapping[str, str]) -> bool:
        body = {"apiVersion": "authorization.k8s.io/v1", "spec": {**who, "resourceAttributes": right}}
        body["kind"] = "SelfSubjectAccessReview" if not who else "SubjectAccessReview"
        async with turns:
            path = f"/apis/authorization.k8s.io/v1/{kind}"
            answer = await client.connection.request("post", path, body=body)
        return bool((answer.get("status") or {}).get("allowed"))

    try:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(allowed(right)) for right in asked]
    except ExceptionGroup as error:
        raise error.exceptions[0] from None  # the others have ended, too, before the connection does
    return [
        f"{right['verb']} {right['resource']}" + (f"/{right['subresource']}" if right["subresource"] else "")
        for right, yes in zip(asked, answers, strict=True)
        if not yes.result()
    ]


async def _storage(client: "AsyncClient") -> list[Finding]:
    """The claims that jobs name, and whether several nodes can mount them."""
    wanted: dict[tuple[str, str], int] = {}
    for job in await _jobs(client):
        most = _pods_of(job)
        pod = ((job.get("spec") or {}).get("template") or {}).get("spec") or {}
        for volume in pod.get("volumes") or []:
            if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
                key = (job["metadata"]["namespace"], str(claim))
                wanted[key] = max(most, wanted.get(key, 0))
    found = []
    claims: dict[tuple[str, str], Any] = {}
    for namespace in sorted({key[0] for key in wanted}):
        for item in await _items(client, f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"):
            claims[namespace, _name(item)] = item
    for (namespace, name), most in wanted.items():
        claim, where = claims.get((namespace, name)), f"claim {namespace}/{name}"
        if claim is None:
            found.append(
                Finding("storage", "failed", f"{where}, which a job names, is not there", "create it")
            )
        elif most > 1 and not {"ReadWriteMany"} & set(claim["spec"].get("accessModes") or ()):
            text = f"{where} can be mounted by one node, and its job has up to {most} pods"
            found.append(Finding("storage", "warning", text, "a claim with ReadWriteMany"))
        elif (claim.get("status") or {}).get("phase") == "Lost":
            found.append(Finding("storage", "failed", f"{where} has lost its volume", "restore it"))
    classes = await _items(client, "/apis/storage.k8s.io/v1/storageclasses")
    if not classes and not wanted:
        text = "there is no storage class, and no job names a claim"
        return [Finding("storage", "warning", text, "checkpoints need a volume that all nodes can mount")]
    return found or [
        Finding("storage", "ok", f"{len(wanted)} claims of jobs, {len(classes)} storage classes")
    ]


async def _network(client: "AsyncClient") -> list[Finding]:
    """Findings on the network: what NetworkPolicies forbid, and what gangs have shown."""
    closed, waits, across = [], [], 0
    policies = await _items(client, "/apis/networking.k8s.io/v1/networkpolicies")
    for job in await _jobs(client):
        status = job.get("status") or {}
        where = f"{job['metadata']['namespace']}/{_name(job)}"
        rows = {row.get("type"): row for row in status.get("conditions") or []}
        running, allocation = rows.get("Running") or {}, status.get("allocation") or {}
        if len(set(allocation.get("nodes") or ())) > 1 and running.get("status") == "True":
            across += 1
        elif running.get("reason") == "RanksMeeting" and await _meets_late(client, job):
            waits.append(where)
        if _pods_of(job) > 1:
            closed += [f"{where} ({way})" for way in _closed(job, policies)]
    found = []
    fix = "let the pods of a job reach each other on every port (examples/networkpolicy.yaml)"
    if closed:
        text = f"NetworkPolicies keep ranks apart: {some_of(closed)}"
        found.append(Finding("network", "failed", text, fix))
    if waits:
        text = f"ranks have not found each other for {_MEETING_SECONDS:.0f} s: {some_of(waits)}"
        found.append(Finding("network", "warning", text, f"{fix}, through the cloud's firewall, too"))
    shown = (
        f"{across} gangs train over several nodes"
        if across
        else "no gang over several nodes trains, to show it"
    )
    return found or [Finding("network", "ok", f"no NetworkPolicy keeps ranks apart; {shown}")]


async def _meets_late(client: "AsyncClient", job: Mapping[str, Any]) -> bool:
    """True if the plan by which its ranks meet is old; the condition may have been False for longer."""
    from ballast.client import Forbidden, NotFound
    from ballast_policies.contract.messages import plan_config_map_name

    from ballast_operator.views.clock import http_date
    from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION

    path = f"/api/v1/namespaces/{job['metadata']['namespace']}/configmaps/{plan_config_map_name(_name(job))}"
    try:
        plan = await client.connection.request("get", path)
    except (Forbidden, NotFound):
        return False
    now = http_date(client.connection.date) or datetime.datetime.now(datetime.UTC)
    written = (plan["metadata"].get("annotations") or {}).get(PLAN_WRITTEN_ANNOTATION)
    return _age(written, now) > _MEETING_SECONDS


def _pods_of(job: Mapping[str, Any]) -> int:
    """Most pods of the job at a time; with ``planner``, by the degrees that it states, or as launched."""
    from ballast_operator.views.spec import read_spec

    allocation = (job.get("status") or {}).get("allocation") or {}
    spec, _ = read_spec({**job, "spec": {**(job.get("spec") or {}), "planner": None}, "status": {}})
    pods = 1 if spec is None else spec.largest_gang // spec.gpus_per_pod  # it cannot run: none
    return max(pods, len(allocation.get("pods") or ()))


def _closed(job: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ways that no NetworkPolicy leaves open between two pods of the job, where one rules them at all."""
    from ballast_policies.contract.messages import JOB_LABEL, LAUNCH_LABEL, RANK_LABEL

    from ballast_operator.desired import MANAGED_BY

    template = ((job.get("spec") or {}).get("template") or {}).get("metadata") or {}
    ours = {**MANAGED_BY, JOB_LABEL: _name(job), LAUNCH_LABEL: "1", RANK_LABEL: "0"}
    labels = {**(template.get("labels") or {}), **ours}
    specs = [
        one["spec"]
        for one in policies
        if one["metadata"]["namespace"] == job["metadata"]["namespace"]
        and _selects(one["spec"].get("podSelector") or {}, labels)
    ]
    closed = []
    for way, peers in (("ingress", "from"), ("egress", "to")):
        types = [
            spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
            for spec in specs
        ]
        ruling = [spec for spec, named in zip(specs, types, strict=True) if way.capitalize() in named]
        rules = [rule for spec in ruling for rule in spec.get(way) or ()]
        if ruling and not any(_lets(rule, peers, labels) for rule in rules):
            closed.append(way)
    return closed


def _lets(rule: Mapping[str, Any], peers: str, labels: Mapping[str, str]) -> bool:
    """True if it may let pods of these labels through on every port; networks and other namespaces may."""
    ports = rule.get("ports") or ()
    return (not ports or any("port" not in port for port in ports)) and (
        not rule.get(peers)
        or any(
            not {"ipBlock", "namespaceSelector"}.isdisjoint(peer)
            or _selects(peer.get("podSelector") or {}, labels)
            for peer in rule[peers]
        )
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    from ballast_operator.views.node_constraints import Requirement

    rows = [
        Requirement(row["key"], row["operator"], tuple(row.get("values") or ()))
        for row in selector.get("matchExpressions") or ()
    ]
    wanted = (selector.get("matchLabels") or {}).items()
    return wanted <= labels.items() and all(row.holds(labels.get(row.key)) for row in rows)


CHECKS: Mapping[str, "Callable[[AsyncClient], Awaitable[list[Finding]]]"] = {
    "kubernetes": _kubernetes,
    "clock": _clock,
    "definitions": _definitions,
    "operator": _operator,
    "operator's rights": _operators_rights,
    "your rights": _own_rights,
    "policy": _policies,
    "nodes": _nodes,
    "storage": _storage,
    "network": _network,
}
"""Name -> what it does; in the order in which they are printed."""
