"""Errors of a local cluster.

LocalClusterError
├── BinariesError      no control-plane binaries, and none can be built
├── StartError         a component ended or was not ready within its time limit
└── NodesFileError     a node description cannot be read
"""


class LocalClusterError(Exception):
    """Base of this package's errors; the text says what to change."""


class BinariesError(LocalClusterError):
    """The control-plane binaries are not there and cannot be built."""


class StartError(LocalClusterError):
    """A component of the cluster ended, or was not ready within its time limit."""


class NodesFileError(LocalClusterError):
    """A description of nodes names an unknown key or an impossible value."""
