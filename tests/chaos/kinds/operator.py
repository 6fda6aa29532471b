"""The operator dies, stops or is not answered; its watches stall, and clocks jump."""

from ballast_operator.errors import Conflict, Unavailable
from ballast_operator.kube.caches import WATCHED

from tests.chaos.cluster import ChaosSimulation, Crash
from tests.chaos.kinds.registry import kind, until


def _at_write(simulation: ChaosSimulation, number: int, error: BaseException, *, landed: bool) -> None:
    """One of the next writes fails, before or after it has landed."""

    def fail() -> None:
        raise error

    if not landed:
        simulation.trouble.next_write += [lambda: None] * (number % 7) + [fail]
        return
    last = simulation.world.writes + number % 7

    def after(write: int) -> None:
        if write >= last:
            simulation.world.after_write = lambda _: None
            raise error

    simulation.world.after_write = after


@kind("operator killed after a write")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Crash(), landed=True)


@kind("operator killed before a write")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Crash(), landed=False)


@kind("operator stopped for a while")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.away = until(simulation, number, 12)


@kind("answer lost")
def _(simulation: ChaosSimulation, number: int) -> None:
    _at_write(simulation, number, Unavailable("the answer was lost"), landed=True)


for code, error in {
    "409": Conflict("HTTP 409"),
    "410": Unavailable("HTTP 410"),
    "429": Unavailable("HTTP 429"),
    "500": Unavailable("HTTP 500"),
    "time-out": Unavailable("TimeoutError"),
}.items():

    @kind(f"write answered by {code}")
    def _(simulation: ChaosSimulation, number: int, error: Exception = error) -> None:
        _at_write(simulation, number, error, landed=False)


@kind("API server or etcd away")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.error = Unavailable("connection refused")
    simulation.trouble.api_down = until(simulation, number, 10)


@kind("watch stalled")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.trouble.stalled[WATCHED[number % len(WATCHED)]] = until(simulation, number // 7, 12)


@kind("clock jumps ahead")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.jump(10 + number % 400)


@kind("clock jumps back")
def _(simulation: ChaosSimulation, number: int) -> None:
    simulation.jump(-(1 + number % 60))
