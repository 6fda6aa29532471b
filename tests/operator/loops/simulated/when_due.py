"""The simulation with an allocator that decides only when the operator's would: asked to, or at its time."""

from ballast_operator.kube.kinds import Key
from ballast_operator.kube.queue import KeyQueue
from ballast_operator.reconcile.changes import Changes
from ballast_operator.settings import JobSettings

from tests.operator.loops.simulated.simulation import Simulation


class DecidesWhenDue(Simulation):
    """As :class:`Simulation`; every job still gets a pass in every tick."""

    def start_operator(self) -> None:
        """A fresh process, whose watches ask for decisions; its first is asked for by its start."""
        super().start_operator()
        queue: KeyQueue[Key] = KeyQueue(self._seconds)
        changes = Changes(self.observer, self.board, queue, settings=JobSettings())
        changes.allocate = self.asked_to_decide
        self.caches.listeners.append(changes.changed)
        self.asked, self.decisions = True, 0

    def asked_to_decide(self) -> None:
        """A watch or a pass has something new for the allocator."""
        self.asked = True

    async def decide(self) -> None:
        """One decision, if it is due."""
        at = self.allocator.next_at
        if self.asked or (at is not None and at <= self.now.timestamp()):
            self.asked = False
            self.decisions += 1
            await super().decide()
