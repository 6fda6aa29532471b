"""Addresses of pods: each has its own in 127.0.0.0/8, unique on the machine over all clusters.

An agent claims one 127.X.0.0/16 by listening on a port of 127.X.0.1.  The kernel is the registry: two
agents, of any user, cannot hold the same claim, and a dead agent holds none.
"""

import errno
import random
import socket

from ballast_localcluster.errors import LocalClusterError

_CLAIM_PORT = 29399
_BLOCKS = range(10, 250)
_LAST = 256 * 256 - 2


class PodAddresses:
    """The addresses of one agent; closing gives the claim back."""

    def __init__(self) -> None:
        self._claim, self.block = _claim_block()
        self._next = 2
        self._used: set[str] = set()

    def take(self) -> str:
        """An address that no pod has.  Freed ones come again last, when connections to them are forgotten."""
        for _ in range(_LAST):
            number, self._next = self._next, self._next + 1 if self._next < _LAST else 2
            address = f"127.{self.block}.{number // 256}.{number % 256}"
            # .0 and .255 are fine for the kernel and surprising for people.
            if number % 256 not in (0, 255) and address not in self._used:
                self._used.add(address)
                return address
        raise LocalClusterError(f"all addresses of 127.{self.block}.0.0/16 are in use")

    def give_back(self, address: str) -> None:
        """The pod is gone."""
        self._used.discard(address)

    def close(self) -> None:
        """Give the block back."""
        self._claim.close()


def _claim_block() -> tuple[socket.socket, int]:
    for block in random.sample(_BLOCKS, len(_BLOCKS)):
        claim = socket.socket()
        try:
            claim.bind((f"127.{block}.0.1", _CLAIM_PORT))
            claim.listen()
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise LocalClusterError(
                    f"this system has no loopback address 127.{block}.0.1 (on macOS only 127.0.0.1 exists), "
                    "and each pod of a process node needs its own. To fix: use Linux, or a kubeconfig of a "
                    "real cluster."
                ) from error
            continue
        return claim, block
    raise LocalClusterError(
        f"all of 127.10.0.0/16 to 127.249.0.0/16 are claimed (port {_CLAIM_PORT}). "
        f"To fix: stop other local clusters, or what listens on port {_CLAIM_PORT} of every address."
    )
