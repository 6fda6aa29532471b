"""The ranks of an epoch as one process group, and the store they meet at.

Every epoch of a plan has its own process group, with its own prefix in the store, so that
ranks that leave or join never touch the others' connections.  The store lives on rank 0's pod.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract.plan import Plan

from ballast_trainer.causes import notes_of, shortage
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.connections import CONNECTIONS
from ballast_trainer.distributed.heartbeat import record_collectives
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.distributed.survivors import undecided
from ballast_trainer.errors import PeerLost, Stopped

_STORE_POLL_SECONDS = 0.05
_PATIENCE = datetime.timedelta(days=7)

_limit: datetime.timedelta | None = None
"""Limit of waits in the default process group; torch would give another group half an hour."""

_PEER_FAILURES = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "failed to recv, got 0 bytes",
    "Application timeout caused pair closure",
    "NCCL",
)
"""Texts of gloo, the store and NCCL when another rank is gone; they have no exception type for it."""

_FAILURES_IN_LAYERS = ("gloo/transport", "Application timeout caused pair closure", "NCCL")
"""The same where a layer of the user's has failed, whose own errors may time out, too."""


@contextlib.contextmanager
def peer_failures() -> Iterator[None]:
    """Turn torch's communication errors into :class:`PeerLost`, but for those of this rank's own limits."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        CONNECTIONS.stay_if_left_behind()
        if is_peer_failure(error):
            said = _said(str(error))
            raise PeerLost(f"another rank is gone: {said}. Its own output has the reason") from error
        raise


def is_peer_failure(error: BaseException) -> bool:
    """True if an error tells that another rank is gone."""
    if shortage(error):
        return False
    notes = notes_of(error)
    words = _FAILURES_IN_LAYERS if notes else _PEER_FAILURES
    of_torch = isinstance(error, dist.DistError) or (isinstance(error, ConnectionError) and not notes)
    return of_torch or any(word in str(error) for word in words)


def _said(text: str) -> str:
    """The last line of a communication error, without gloo's source position and advice."""
    line = text.strip().splitlines()[-1]
    line = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", line)
    return line.partition(". This is typically caused")[0].rstrip(".")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the ranks of an epoch.

    Attributes:
        epoch: the plan's epoch.
        rank, size: of all ranks, over all axes of the mesh.
        processes: names of all ranks' processes, by rank (``Rank.process``).
        device: where tensors live.
        store: where ranks meet; None for a process alone.
        mesh: how ranks are laid out.
        pipeline, data, tensor: this rank's line along each axis.
        patient_group: all ranks, without the limit of the default group: for storage that may take long.
            A rank that dies closes its connections, and one that hangs misses its heartbeats.
    """

    epoch: int
    rank: int
    size: int
    processes: tuple[str, ...]
    device: torch.device
    store: Any = None
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    pipeline: Axis = dataclasses.field(default_factory=Axis)
    data: Axis = dataclasses.field(default_factory=Axis)
    tensor: Axis = dataclasses.field(default_factory=Axis)
    patient_group: Any = None

    @property
    def position(self) -> int:
        """This rank's position in the pipeline, the rank number used by stages."""
        return self.mesh.place(self.rank).position

    @property
    def positions(self) -> int:
        """Length of the pipeline."""
        return self.mesh.positions(self.size)

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks; the same floats on each."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.device.type == "cpu":
            tree_sum(tensor, rank=self.rank, size=self.size)
        else:
            dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def sum_rows(self, rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Rows of numbers by name, as long on each rank, summed over the ranks as one message."""
        return rows_of(self.sum([value for row in rows.values() for value in row]), rows)

    def from_rank_0(self, value: Any, *, patient: bool = False) -> Any:
        """``value`` of rank 0, on every rank; ``patient`` waits for it as long as rank 0 lives."""
        if self.size == 1:
            return value
        box = [value]
        if patient and self.patient_group is not None:
            dist.broadcast_object_list(box, src=0, group=self.patient_group, device=torch.device("cpu"))
        else:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: Any, *, patient: bool = False) -> list[Any]:
        """The values of all ranks, by rank, on every rank; ``patient`` waits as long as all live."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.patient_group if patient else None)
        return values

    def leave(self) -> None:
        """End the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        CONNECTIONS.forget()


def rows_of(values: Iterable[float], like: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Rows by name of the numbers of all of them, as long as those of ``like``."""
    rest = iter(values)
    return {name: [next(rest) for _ in row] for name, row in like.items()}


def serve_store(address: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Rank 0's store, listening on ``address`` alone: several jobs share a machine and its ports.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(
    address: str, port: int, timeout_seconds: float, stop: StopSignal | None = None
) -> dist.TCPStore:
    """The store of rank 0, from another rank; waits until it is there.

    Raises:
        PeerLost: rank 0 does not answer in time.
        Stopped: SIGTERM came while waiting; torch itself would keep waiting.
    """
    connecting: Future[dist.TCPStore] | None = None
    deadline = time.monotonic() + timeout_seconds
    while connecting is None or not connecting.done():
        if stop is not None and stop.received:
            raise Stopped("told to stop before the first step; nothing to save")
        if time.monotonic() > deadline:
            does = "listen" if connecting is None else "answer"
            raise PeerLost(
                f"rank 0 does not {does} on {address}:{port} after {timeout_seconds:g} s. To fix: what rank 0"
                " says, the network between, or a larger training.commTimeoutSeconds"
            )
        if connecting is None and _listens(address, port):
            connecting = _connecting(address, port, timeout_seconds)
        time.sleep(_STORE_POLL_SECONDS)
    with peer_failures():
        return connecting.result()


def _connecting(address: str, port: int, timeout_seconds: float) -> "Future[dist.TCPStore]":
    """The store, once it has answered; a thread waits: for one that only accepts torch waits for ever."""
    found: Future[dist.TCPStore] = Future()

    def connect() -> None:
        try:
            store = dist.TCPStore(
                address,
                port,
                is_master=False,
                timeout=datetime.timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        except Exception as error:
            found.set_exception(error)
        else:
            found.set_result(store)

    threading.Thread(target=connect, daemon=True).start()
    return found


def told_once(store: Any, key: str, value: Any, *, tells: bool) -> Any:
    """Value that the first that ``tells`` has stored under a key, in JSON; its own where it is this one.

    Ranks read what a launch needs at different times, and its user may change it: all must do the same.

    Raises:
        PeerLost: the store has ended.
    """
    with peer_failures():
        if tells and not store.check([key]):
            store.set(key, json.dumps(value))
            return value
        return json.loads(store.get(key))


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def join(
    *,
    store: Any,
    plan: Plan,
    rank: int,
    device: torch.device,
    timeout_seconds: float,
    mesh: Mesh | None = None,
) -> World:
    """Enter the process group of the plan's epoch; returns when all ranks are in it.

    Raises:
        PeerLost: a rank does not come in time.
        ConfigurationError: the plan's ranks do not fill the mesh.
    """
    global _limit  # noqa: PLW0603 - as torch's default process group, whose limit it is
    _limit = datetime.timedelta(seconds=timeout_seconds)
    size = len(plan.ranks)
    mesh = mesh or Mesh()
    mesh.positions(size)
    if size > 1:
        # Gloo has a connection to each rank of each group, and aborts where it may have no more.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS takes no infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        address = plan.ranks[rank].address
        if address.startswith("127."):
            # Gloo binds the address of the host name, which need not be a loopback address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            record_collectives()
        if dist.get_pg_count():
            # Torch numbers groups anew where the default one is destroyed, and the last one failed to begin.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        with peer_failures(), CONNECTIONS.opening():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                # A connection of its own: whoever waits there for a rank that is gone can be woken.
                store=dist.PrefixStore(
                    f"launch-{plan.launch}/epoch-{plan.epoch}/{undecided(store)}", store.clone()
                ),
                rank=rank,
                world_size=size,
                timeout=_limit,
                # NCCL connects now, not in the first step, and groups of some ranks are split from this one.
                device_id=device if device.type == "cuda" else None,
            )
    with peer_failures():
        axes = {
            name: _axis(mesh.lines(axis, size), rank, size)
            for name, axis in (("pipeline", "position"), ("data", "data"), ("tensor", "tensor"))
        }
        patient = patient_group() if size > 1 else None
    return World(
        epoch=plan.epoch,
        rank=rank,
        size=size,
        processes=tuple(member.process for member in plan.ranks),
        device=device,
        store=store,
        mesh=mesh,
        patient_group=patient,
        **axes,
    )


def new_group(ranks: Sequence[int]) -> Any:
    """A process group of some ranks, which wait as long as in the default one; collective over all ranks."""
    with CONNECTIONS.opening():
        return dist.new_group(list(ranks), timeout=_limit)


def patient_group() -> Any:
    """A further ``World.patient_group``, for a thread of its own; collective over all ranks."""
    with CONNECTIONS.opening():
        return dist.new_group(backend="gloo", timeout=_PATIENCE)


def _axis(lines: tuple[tuple[int, ...], ...], rank: int, size: int) -> Axis:
    """This rank's line; every rank makes the groups of all lines, as torch wants it."""
    made = {line: new_group(line) for line in lines if 1 < len(line) < size}
    (mine,) = [line for line in lines if rank in line]
    return Axis(ranks=mine, index=mine.index(rank), group=made.get(mine))


_TAG = 1 << 21
"""Apart from the tags of layers that move, of schedules and of timed links."""


def tree_sum(tensor: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Sum a tensor over the ranks of the default group, in place; collective.

    A binomial tree with rank 0 at its root: up to it the sums, down from it the total.  So all ranks
    hold the same floats, added in the same order every time.  gloo's all-reduce is a ring: 2 (n - 1) hops
    one after another, each of which wakes a process; for the short vector of each step a tree's 2 log2 n hops
    are several times faster (``benchmarks/trainer/agreement.py``).  The tensor is contiguous, and of the same
    shape and type on each rank.
    """
    theirs = torch.empty_like(tensor)
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            dist.recv(theirs, rank + distance, tag=_TAG)
            tensor += theirs
        distance *= 2
    if rank > 0:
        dist.send(tensor, rank - distance, tag=_TAG)
        dist.recv(tensor, rank - distance, tag=_TAG)
    sending = []
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            sending.append(dist.isend(tensor, rank + distance, tag=_TAG))
    for work in sending:
        if work is not None:
            work.wait()
    return tensor
