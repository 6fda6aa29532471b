"""A trainer that does not train: it keeps the contract over the real API with its pod's own rights.

Steps are counted, a tenth of a second each; ``SCRIPT`` (JSON in the environment) says how many, and when
to propose a shrink to how many pods.
"""

import base64
import datetime
import http.client
import json
import os
import ssl
import sys
import tempfile
import time
from pathlib import Path

from ballast_policies.contract.messages import (
    ACK_ANNOTATION,
    FINISHED_ANNOTATION,
    PLAN_KEY,
    PROPOSAL_ANNOTATION,
    REPORT_ANNOTATION,
    Ack,
    ExitCode,
    ExitReason,
    Proposal,
    Report,
    TerminationMessage,
    lease_name,
    plan_config_map_name,
)
from ballast_policies.contract.plan import Directive, Plan

JOB, NAMESPACE, POD = (os.environ[f"BALLAST_{name}"] for name in ("JOB", "NAMESPACE", "POD_NAME"))
SCRIPT = json.loads(os.environ["SCRIPT"])
STEP_SECONDS = 0.1


class Api:
    """GET and PATCH with the pod's token, over one connection."""

    def __init__(self) -> None:
        config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=authority)
        self._server = cluster["server"].removeprefix("https://")
        self._token = Path(config["users"][0]["user"]["tokenFile"])
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._server, context=self._context, timeout=10)

    def call(self, method: str, path: str, body: object = None) -> dict:
        """The decoded answer. An API server that does not answer is asked again until it does.

        Raises:
            RefusedError: the API server answered with an error status.
        """
        headers = {
            "Authorization": f"Bearer {self._token.read_text()}",
            "Content-Type": "application/merge-patch+json",
        }
        data = None if body is None else json.dumps(body)
        while True:
            try:
                self._connection.request(method, path, data, headers)
                answer = self._connection.getresponse()
                text = answer.read()
            except (
                http.client.HTTPException,
                OSError,
            ):  # its connection was idle for too long, or it is away
                self._connection.close()
                self._connection = self._connect()
                time.sleep(STEP_SECONDS)
                continue
            if answer.status == http.client.FORBIDDEN:  # its authorizer has not seen the role yet
                time.sleep(STEP_SECONDS)
                continue
            if answer.status >= 400:
                raise RefusedError(answer.status, text.decode(errors="replace"))
            return json.loads(text)


class RefusedError(Exception):
    """Status and text of an error."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.args[0]


def leave(code: ExitCode, reason: ExitReason, step: int) -> None:
    Path(os.environ["BALLAST_TERMINATION_LOG"]).write_text(
        TerminationMessage(reason=reason, message="scripted", step=step).to_json()
    )
    sys.exit(code)


class Rank:
    """What this process knows."""

    def __init__(self) -> None:
        self.api = Api()
        self.checkpoint = Path(os.environ["BALLAST_CHECKPOINT_PATH"]) / "step"
        self.step = int(self.checkpoint.read_text()) if self.checkpoint.exists() else 0
        self.epoch = 0

    def plan(self) -> Plan | None:
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{plan_config_map_name(JOB)}"
        try:
            return Plan.from_json(self.api.call("GET", path)["data"][PLAN_KEY])
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def lease(self) -> dict:
        """As the answer to a patch that changes nothing: a trainer may not read it."""
        return self.api.call("PATCH", self.lease_path(), {})

    def lease_path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{lease_name(JOB)}"

    def say(self, **messages: str) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {"metadata": {"annotations": messages}, "spec": {"renewTime": now}}
        self.api.call("PATCH", self.lease_path(), body)

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.checkpoint.parent, delete=False) as file:
            file.write(str(self.step))
        Path(file.name).replace(self.checkpoint)

    def run(self) -> None:
        seen: Plan | None = None
        while True:
            plan = self.plan()
            if plan is not None and plan.rank_of(POD) is not None:
                seen = plan
                self.lead(plan) if plan.rank_of(POD) == 0 else self.follow(plan)
            elif plan is not None and seen is not None and plan.launch == seen.launch:
                leave(ExitCode.OK, ExitReason.RELEASED, self.step)
            time.sleep(STEP_SECONDS)

    def follow(self, plan: Plan) -> None:
        if plan.directive is Directive.CHECKPOINT_AND_STOP:
            leave(ExitCode.STOPPED, ExitReason.STOPPED, self.step)
        if FINISHED_ANNOTATION in (self.lease()["metadata"].get("annotations") or {}):
            leave(ExitCode.OK, ExitReason.FINISHED, self.step)

    def lead(self, plan: Plan) -> None:
        if plan.epoch > self.epoch:
            self.epoch = plan.epoch
            pause = 1.5 if plan.directive is Directive.SHRINK else None
            if plan.directive is Directive.CHECKPOINT_AND_STOP:
                self.save()
            self.say(**{ACK_ANNOTATION: Ack(epoch=plan.epoch, step=self.step, pause_ms=pause).to_json()})
            if plan.directive is Directive.CHECKPOINT_AND_STOP:
                leave(ExitCode.STOPPED, ExitReason.STOPPED, self.step)
            return
        self.step += 1
        if (
            self.step >= SCRIPT["total"]
            and "finishFile" in SCRIPT
            and not Path(SCRIPT["finishFile"]).exists()
        ):
            self.step -= 1  # the last step is the test's to allow: what it waits for may take any time
        messages = {
            REPORT_ANNOTATION: Report(
                epoch=plan.epoch,
                step=self.step,
                loss=1 / self.step,
                # As if each rank added as much: otherwise no gang would have a reason to grow.
                steps_per_second=len(plan.ranks) / STEP_SECONDS,
            ).to_json()
        }
        keep = SCRIPT.get("keep")
        if keep is not None and self.step >= SCRIPT["shrinkAt"] and len(plan.ranks) > keep:
            pods = tuple(rank.pod for rank in plan.ranks)
            messages[PROPOSAL_ANNOTATION] = Proposal(
                epoch=plan.epoch,
                step=self.step,
                kept_pods=pods[:keep],
                released_pods=pods[keep:],
                stages=(),
                step_seconds_before=0.1,
                step_seconds_after=0.1,
                reason="scripted",
            ).to_json()
        if self.step >= SCRIPT["total"]:
            self.save()
            messages[FINISHED_ANNOTATION] = str(self.step)
        self.say(**messages)
        if self.step >= SCRIPT["total"]:
            leave(ExitCode.OK, ExitReason.FINISHED, self.step)


if __name__ == "__main__":
    Rank().run()
