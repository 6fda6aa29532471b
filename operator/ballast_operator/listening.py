"""The address that the operator's pages are served at, and how many may be connected to it."""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.http import HttpProcessingError

logger = logging.getLogger(__name__)

NO_REQUEST = (HttpProcessingError, web.RequestPayloadError)
"""Errors raised for a client's bytes that are no request, or whose content cannot be read."""


def _is_ours(record: logging.LogRecord) -> bool:
    """True if it is an error of this program: anybody can send what is no request, as often as they like."""
    return record.exc_info is None or not isinstance(record.exc_info[1], NO_REQUEST)


logger.addFilter(_is_ours)

MOST_CONNECTIONS, LOOK_SECONDS = 500, 1.0
"""Connections at one address, and seconds between two counts. Each is a file that the process has open."""


async def listen(application: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve at ``host``; empty: at every address, of IPv4 and, where the machine has it, of IPv6.

    Beyond ``MOST_CONNECTIONS`` the oldest are closed, e.g. of clients that never end their requests.

    Returns:
        The runner, to clean up, and the port: a free one where ``port`` is 0.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    async def bounded(_: web.Application) -> AsyncIterator[None]:
        counting = asyncio.create_task(_close_the_oldest(runner))
        yield
        counting.cancel()

    application.cleanup_ctx.append(bounded)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, logger=logger)
    await runner.setup()
    if host:
        await web.TCPSite(runner, host, port).start()
    else:
        await web.SockSite(runner, _of_every_family(port)).start()
    return runner, int(runner.addresses[0][1])


async def _close_the_oldest(runner: web.AppRunner) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if runner.server is not None:
            for connection in runner.server.connections[:-MOST_CONNECTIONS]:
                connection.force_close()


def _of_every_family(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:  # IPv6 is there, and switched off, as in many containers
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port))
