"""Ports and loopback addresses that no other process of the tests takes."""

import atexit
import functools
import itertools
import socket

from ballast_localcluster.nodes.pod_resources.addresses import PodAddresses

_FIRST, _EACH, _BLOCKS = 61_000, 18, 250
"""First port, above those that the kernel hands out by itself (32768 to 60999); ports of a process; blocks of
addresses, each of one process."""

_numbers = itertools.count()


def free_port(*, successive: int = 1) -> int:
    """A port of this process's own that nothing listens on; so are the ``successive - 1`` after it."""
    block = own_addresses().block
    assert block < _BLOCKS, block
    first = _FIRST + block * _EACH
    for _ in range(_EACH):
        number = next(_numbers) * successive % (_EACH - successive + 1)
        ports = [first + number + more for more in range(successive)]
        if all(map(_is_free, ports)):
            return ports[0]
    raise AssertionError(f"something listens on each of the ports {first} to {first + _EACH - 1}")


@functools.cache
def own_addresses() -> PodAddresses:
    """This process's block of addresses, claimed until it ends."""
    addresses = PodAddresses()
    atexit.register(addresses.close)
    return addresses


def loopbacks() -> tuple[str, ...]:
    """Hosts of URLs at which this machine reaches itself; IPv6 may be switched off."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return ("127.0.0.1",)
    return "127.0.0.1", "[::1]"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
