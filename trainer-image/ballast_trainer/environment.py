"""Strict reading of environment variables, and what a launch says of this process: its rank, its device."""

import dataclasses
import enum
from collections.abc import Mapping

from ballast_policies.contract.limits import MOST_SECONDS

from ballast_trainer.errors import ConfigurationError


def seconds_from(environment: Mapping[str, str], name: str) -> float | None:
    """The seconds in a variable; None: not set. Raises ConfigurationError: they are no number above 0."""
    text = environment.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise ConfigurationError(name, f"{text!r} is not a number of seconds. To fix: e.g. 30") from error
    if not 0 < seconds <= MOST_SECONDS:
        reason = f"{text} is not above 0 and at most {MOST_SECONDS:g}. To fix: a number of seconds, e.g. 30"
        raise ConfigurationError(name, reason)
    return seconds


class DeviceChoice(enum.StrEnum):
    """Device of the ranks; ``AUTO``: GPUs where each rank of the machine has one, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunRank:
    """This process among those that a launcher such as torchrun has started; alone where there is none.

    Attributes:
        rank, ranks: of all.
        local_rank, local_ranks: of those on this machine.
        address, port: where the ranks meet; empty and 0 for one rank alone.
        store_outlives: whether a process that is none of them serves their store.
        restarts: how often the rank was started before, and was lost.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    address: str = ""
    port: int = 0
    store_outlives: bool = False
    restarts: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "TorchrunRank":
        """Rank by torchrun's variables. Raises ConfigurationError: one is missing or makes no sense."""

        def count(name: str, default: int) -> int:
            text = environment.get(name, str(default))
            if not text.isdecimal():
                raise ConfigurationError(name, f"{text!r} is not a count. To fix: {_ADVICE}")
            return int(text)

        ranks, rank, local_rank = count("WORLD_SIZE", 1), count("RANK", 0), count("LOCAL_RANK", 0)
        if rank >= ranks:
            raise ConfigurationError("RANK", f"{rank} is not below WORLD_SIZE {ranks}. To fix: {_ADVICE}")
        if ranks == 1:
            return cls(local_rank=local_rank)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise ConfigurationError(name, f"not set, with WORLD_SIZE {ranks}. To fix: {_ADVICE}")
        port = count("MASTER_PORT", 0)
        if not 1 <= port <= MOST_PORT:
            raise ConfigurationError("MASTER_PORT", f"{port} is not 1 to {MOST_PORT}. To fix: {_ADVICE}")
        return cls(
            rank=rank,
            ranks=ranks,
            local_rank=local_rank,
            local_ranks=max(count("LOCAL_WORLD_SIZE", 1), local_rank + 1),
            address=environment["MASTER_ADDR"],
            port=port,
            store_outlives=bool(environment.get(STORE_OUTLIVES_ENV)),
            restarts=count(RESTARTS_ENV, 0),
        )


STORE_OUTLIVES_ENV = "BALLAST_STORE_OUTLIVES"
"""Set where the process that has started the ranks has another one serve their store."""
RESTARTS_ENV = "BALLAST_RESTARTS"
"""Variable: how often the process that has started the rank had started it before."""
MOST_PORT = 65_535
_ADVICE = "start with torchrun, which sets it, or with --ranks"
