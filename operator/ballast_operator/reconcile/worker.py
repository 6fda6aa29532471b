"""Passes over the jobs of a queue, and when one that failed is repeated."""

import logging
import time
from collections.abc import Callable

from ballast_operator.errors import Conflict, NotFound, NotLeader, Rejected, Unavailable, for_good
from ballast_operator.kube.kinds import Key
from ballast_operator.metrics import Metrics
from ballast_operator.reconcile.reconciler import Reconciler

logger = logging.getLogger(__name__)

MOST_SECONDS, MOST_SECONDS_REFUSED = 60.0, 3600.0
"""Longest pauses until a pass is repeated without news; the second where the content is refused."""

FAILING = 5
"""Passes in a row that end with an error, from which on a job counts as failing."""


class ReconcileWorker:
    """Runs passes for a queue and says when to look again; the one place where a pass's errors end."""

    def __init__(
        self, reconciler: Reconciler, *, metrics: Metrics, again: Callable[[Key, float], None]
    ) -> None:
        self._reconciler = reconciler
        self._metrics = metrics
        self._again = again
        self._failures: dict[Key, int] = {}

    @property
    def failing(self) -> int:
        """Jobs of which no pass succeeds."""
        return sum(1 for count in self._failures.values() if count >= FAILING)

    async def __call__(self, key: Key) -> None:
        """One pass over ``key``; NotLeader is raised on."""
        started = time.monotonic()
        try:
            again = await self._reconciler.reconcile(key)
        except (Conflict, NotFound) as error:
            logger.debug("job=%s/%s requeued: %s", *key, error)
            self._later(key, type(error).__name__, base=0.1)
        except Unavailable as error:
            logger.warning("job=%s/%s requeued: %s", *key, error)
            self._later(key, "Unavailable", base=1.0)
        except Rejected as error:
            logger.error("job=%s/%s refused by the API server: %s", *key, error)
            await self._reconciler.report_error(key, error)
            most = MOST_SECONDS_REFUSED if for_good(error) else MOST_SECONDS
            self._later(key, "Rejected", base=5.0, most=most)
        except NotLeader:
            raise
        except Exception as error:  # a bug in one job's pass must not stop the others'
            logger.exception("job=%s/%s failed", *key)
            await self._reconciler.report_error(key, error)
            self._later(key, "Bug", base=5.0)
        else:
            self._failures.pop(key, None)
            if again.after_seconds is not None:
                self._again(key, again.after_seconds)
            for other in again.others:
                self._again(other, 0.0)
        finally:
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def _later(self, key: Key, reason: str, *, base: float, most: float = MOST_SECONDS) -> None:
        self._metrics.reconcile_errors.labels(reason).inc()
        self._failures[key] = self._failures.get(key, 0) + 1
        self._again(key, min(most, base * 2.0 ** min(self._failures[key] - 1, 20)))
