"""Jobs that hold GPUs, by job and by node; kept up to date, as a launch asks for it."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.kinds import Key


class GpuHolders:
    """The GPUs that jobs hold by their status, or are about to hold by a write under way.

    Args:
        status: job -> its status; None where there is none that can be read.
        reservations: launches whose writing is under way, as they are when it is asked: their GPUs are taken.
    """

    def __init__(
        self,
        status: Callable[[Key], TrainingJobStatus | None],
        reservations: Mapping[Key, JobAllocation] = MappingProxyType({}),
    ) -> None:
        self._status = status
        self._held: dict[Key, JobAllocation] = {}
        self._on_node: dict[str, set[Key]] = {}
        self._changed: set[Key] = set()
        self._reservations = reservations

    def __len__(self) -> int:
        """How many jobs hold GPUs by their status."""
        self._read()
        return len(self._held)

    def changed(self, key: Key) -> None:
        """The job has changed, or is gone."""
        self._changed.add(key)

    def allocations_on(self, names: Iterable[str]) -> dict[Key, JobAllocation]:
        """Jobs that hold GPUs of one of the nodes by their status, with all that they hold."""
        self._read()
        return {key: self._held[key] for name in set(names) for key in self._on_node.get(name, ())}

    def on_nodes(self, names: Iterable[str]) -> dict[Key, JobAllocation]:
        """Jobs that take GPUs of one of the nodes, with all that they take."""
        wanted = set(names)
        found = self.allocations_on(wanted)
        return found | {key: held for key, held in self._reservations.items() if wanted & set(held.nodes)}

    def _read(self) -> None:
        while self._changed:
            key = self._changed.pop()
            before = self._held.pop(key, None)
            for name in set(before.nodes) if before is not None else ():
                self._on_node[name].discard(key)
                if not self._on_node[name]:
                    del self._on_node[name]
            status = self._status(key)
            allocation = status.allocation if status is not None else None
            if allocation is not None:
                self._held[key] = allocation
                for name in set(allocation.nodes):
                    self._on_node.setdefault(name, set()).add(key)
