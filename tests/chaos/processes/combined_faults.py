"""What goes wrong at once: each leaves the others less to recover by."""

import signal

from tests.chaos.processes.cluster import API_SERVER, ETCD, REPLICAS
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.kinds import kind, node_of, replica_of, seconds_of


@kind("API server stopped, operators killed and a node lost at once")
def _(episode: Episode, number: int) -> None:
    """Fresh operators find no API server, and then a cluster of which a part has gone without a word."""
    episode.stop_for(API_SERVER, seconds_of(number, 9))
    for name in REPLICAS:
        episode.cluster.kill(name)
    episode.stop_for(episode.cluster.agent(node_of(number)), 20.0)


@kind("etcd killed, leader stopped and trainer killed at once")
def _(episode: Episode, number: int) -> None:
    """Whoever leads next learns of the trainer's end late."""
    leader = episode.leader() or replica_of(number)
    if pid := episode.rank(number):
        episode.cluster.signal_process(pid, signal.SIGKILL)
    episode.stop_for(leader, seconds_of(number, 12))
    episode.cluster.kill(ETCD)


@kind("watches stalled, leader killed and a node's agent killed at once")
def _(episode: Episode, number: int) -> None:
    """The follower takes over with what it knew before."""
    leader = episode.leader() or replica_of(number)
    for name in REPLICAS:
        episode.trouble(name, "stalled", seconds_of(number, 10))
    episode.cluster.kill(episode.cluster.agent(node_of(number)))
    episode.cluster.kill(leader)
