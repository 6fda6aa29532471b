"""Free TCP ports on the loopback address."""

import contextlib
import socket

from ballast_localcluster.components import HOST, Ports


def free_ports() -> Ports:
    """Three different ports that are free now.

    Another process may take one before it is used; `LocalCluster.start` tries again then.
    """
    with contextlib.ExitStack() as stack:
        numbers = []
        for _ in range(3):
            holder = stack.enter_context(socket.socket())
            holder.bind((HOST, 0))
            numbers.append(holder.getsockname()[1])
    etcd, etcd_peers, api_server = numbers
    return Ports(etcd=etcd, etcd_peers=etcd_peers, api_server=api_server)
