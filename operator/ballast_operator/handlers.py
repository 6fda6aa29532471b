"""kopf's handlers: the operator's start, end and health, for those who run it by kopf's command line.

    kopf run --module ballast_operator.handlers --all-namespaces --standalone --liveness http://0.0.0.0:8081/healthz

It does what `ballast operator` does, in a thread and an event loop of its own. No handler of kopf's sees an
object: the operator's own watches fill its caches (``docs/kopf.md``).
"""

import contextlib
import os
import signal
from typing import Any

import kopf

from ballast_operator.api.template import trainer_template
from ballast_operator.app import Operator, Options
from ballast_operator.settings import from_environment
from ballast_operator.tasks import LoopThread

_MOST_PORT = 65_535


@kopf.on.startup()  # type: ignore[untyped-decorator]
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Start the operator; where it ends by itself, as another replica leads, kopf ends as by SIGTERM."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    trainer_template()
    memo.stack = contextlib.AsyncExitStack()
    side = await memo.stack.enter_async_context(LoopThread("operator"))
    memo.operator = Operator(
        Options(
            lease_namespace=os.environ.get("BALLAST_NAMESPACE", "ballast-system"),
            health_host=os.environ.get("BALLAST_METRICS_HOST", ""),
            health_port=_port(os.environ.get("BALLAST_METRICS_PORT", "8080")),
        ),
        from_environment(os.environ),
    )
    memo.running = side.start(memo.operator.run(signals=False))
    memo.running.add_done_callback(_end_kopf)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_PORT:
        raise ValueError(f"BALLAST_METRICS_PORT={text!r} is no port. To fix: 0 to {_MOST_PORT}, or unset")
    return int(text)


def _end_kopf(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@kopf.on.cleanup()  # type: ignore[untyped-decorator]
async def end(memo: kopf.Memo, **_: Any) -> None:
    """Finish what is under way, and give the Lease back."""
    memo.running.remove_done_callback(_end_kopf)
    memo.operator.stop()
    try:
        await memo.running
    finally:
        await memo.stack.aclose()


@kopf.on.probe(id="waiting")  # type: ignore[untyped-decorator]
def waiting(memo: kopf.Memo, **_: Any) -> list[str]:
    """Conditions that the operator waits for; the probe fails where a restart may help."""
    problems, waits = memo.operator.problems(), memo.operator.waits
    found: list[str] = waits.lines()
    if memo.running.done() or problems or waits.broken:
        raise kopf.PermanentError("; ".join([*problems, *found]) or "the operator has ended")
    return found
