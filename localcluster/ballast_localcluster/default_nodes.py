"""Descriptions of nodes in a YAML file, and the ones this package comes with."""

from pathlib import Path

from ballast_localcluster.errors import NodesFileError
from ballast_localcluster.nodes.node import ProcessNode

DEFAULT_NODES = Path(__file__).with_name("default-nodes.yaml")


def default_nodes() -> tuple[ProcessNode, ...]:
    """Three pools of different emulated speed, and one of spot machines."""
    return read_nodes(DEFAULT_NODES)


def read_nodes(path: Path) -> tuple[ProcessNode, ...]:
    """Read a YAML file: ``nodes``, a list of objects with the attributes of :class:`ProcessNode`.

    Raises:
        NodesFileError: no such file, not YAML, or a node that cannot be; the text names it.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise NodesFileError(f"{path}: {error.strerror}") from error
    # What is no text, an impossible date, a number of thousands of digits, or nested too deeply.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NodesFileError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict) or set(content) != {"nodes"} or not isinstance(content["nodes"], list):
        raise NodesFileError(f"{path}: expected one key, nodes, with a list. See {DEFAULT_NODES}.")
    nodes = []
    for values in content["nodes"]:
        try:
            nodes.append(ProcessNode.from_values(values))
        except (TypeError, ValueError, AttributeError) as error:
            raise NodesFileError(f"{path}: {values!r}: {error}") from error
    names = [node.name for node in nodes]
    if double := {name for name in names if names.count(name) > 1}:
        raise NodesFileError(f"{path}: several nodes are named {', '.join(sorted(double))}")
    return tuple(nodes)
