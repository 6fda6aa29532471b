"""The address that the operator's pages are served at."""

import errno
import socket

from aiohttp import web


async def listen(runner: web.BaseRunner, host: str, port: int) -> int:
    """Serve at ``host``; empty: at every address, of IPv4 and, where the machine has it, of IPv6.

    Returns:
        The port; a free one where ``port`` is 0.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    if host:
        await web.TCPSite(runner, host, port).start()
    else:
        await web.SockSite(runner, _of_every_family(port)).start()
    return int(runner.addresses[0][1])


def _of_every_family(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:  # IPv6 is there, and switched off, as in many containers
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port))
