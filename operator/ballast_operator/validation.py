"""A webhook by kopf that refuses what the API server's schema cannot: specs that the operator would not use.

    kopf run --module ballast_operator.validation --all-namespaces --standalone

It is the chart's container ``validation``, off by default, and answers at ``/spec``. Without it such a job
waits, with the same words in its condition ``Admitted``.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import kopf

from ballast_operator.api.meta import API_VERSION
from ballast_operator.views.spec import read_spec

logger = logging.getLogger(__name__)


@kopf.on.startup()  # type: ignore[untyped-decorator]
def listen(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Serve with the certificate of a Secret; kopf reads it again when it is renewed."""
    folder = os.environ.get("BALLAST_VALIDATION_CERTIFICATE", "/etc/ballast/validation")
    settings.scanning.disabled = True
    settings.admission.server = kopf.WebhookServer(
        port=int(os.environ.get("BALLAST_VALIDATION_PORT", "9443")),
        certfile=f"{folder}/tls.crt",
        pkeyfile=f"{folder}/tls.key",
    )


@kopf.on.validate(*API_VERSION.split("/"), "trainingjobs", id="spec")  # type: ignore[untyped-decorator]
def usable(body: Mapping[str, Any], old: Mapping[str, Any] | None, **_: Any) -> None:
    """Refuse a spec that :func:`read_spec` cannot use, unless it says the same of the ``old`` one.

    A job that runs by an earlier spec, or an earlier version's rules, may still be suspended.
    """
    problem = _problem(body)
    if problem and (old is None or _problem(old) != problem):
        raise kopf.AdmissionError(problem, code=422)


def _problem(body: Mapping[str, Any]) -> str:
    """Reason that the spec cannot be used; empty: it can, or that is not known."""
    try:
        return read_spec({**body, "status": {}})[1]
    except Exception:  # kopf would refuse the job for it, which the operator takes and tells of
        logger.exception("the spec of %s is not checked", body.get("metadata", {}).get("name"))
        return ""
