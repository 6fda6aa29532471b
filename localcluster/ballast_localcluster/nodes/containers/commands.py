"""Command that a container's spec runs: environment, expansion, paths, working directory."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ballast_localcluster.credentials import write_kubeconfig
from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.containers.process import Command
from ballast_localcluster.nodes.containers.warm_start import WarmStart
from ballast_localcluster.nodes.node import EMULATED_SLOWDOWN_ANNOTATION, ProcessNode
from ballast_localcluster.nodes.pod_resources.environment import (
    base_environment,
    declared_environment,
    expand,
)
from ballast_localcluster.nodes.pod_resources.references import ConfigurationError, References
from ballast_localcluster.nodes.pod_resources.volumes import MOUNT_PATH, Volumes, mounts_of

_PATH_CHARACTERS = r"[A-Za-z0-9_.\-]"


def translate(text: str, mounts: Mapping[str, Path]) -> str:
    """Put real paths for container paths.

    A container path counts where it is whole: at the beginning or after a character that no path has (so
    ``/data`` is not found in ``/my/data``), and up to the end, a ``/``, or such a character (not in
    ``/database``).  The longest fitting mount wins. ``mounts``: container path -> real path.
    """
    paths = sorted((path.rstrip("/") for path in mounts if path != "/"), key=len, reverse=True)
    if not paths:
        return text
    real = {path.rstrip("/"): str(target) for path, target in mounts.items()}
    pattern = (
        rf"(?<!{_PATH_CHARACTERS})(?<!/)({'|'.join(re.escape(path) for path in paths)})"
        rf"(?=/|$|(?!{_PATH_CHARACTERS}))"
    )
    return re.sub(pattern, lambda match: real[match[1]], text)


def mount_variable(volume: str) -> str:
    """Name of the environment variable that holds the real directory of a mounted volume."""
    return "BALLAST_MOUNT_" + re.sub(r"[^A-Z0-9]", "_", volume.upper())


SLOWDOWN_VARIABLE = "BALLAST_EMULATED_SLOWDOWN"
"""JSON {model family or "default": factor}, from the node's annotation; see the trainer's contract."""

TERMINATION_VARIABLE = "TERMINATION_MESSAGE_PATH"
"""The real file that stands for the container's ``terminationMessagePath``."""

DEFAULT_TERMINATION_PATH = "/dev/termination-log"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandBuilder:
    """Builds the commands of one pod's containers.

    Attributes:
        devices: container name -> indices of the emulated GPUs it holds.
        folder: the pod's own.
        warm_start: forks trainers; None: each starts by itself.
    """

    host_api: Api
    node: ProcessNode
    pod: Manifest
    volumes: Volumes
    devices: Mapping[str, tuple[int, ...]]
    folder: Path
    log_folder: Path
    address: str
    host_address: str
    warm_start: WarmStart | None = None

    async def command(self, container: Manifest, run: int) -> Command:
        """The command of a run, from 0. Raises ConfigurationError: no reference, or nothing to run."""
        if not container.get("command"):
            raise ConfigurationError(
                f"container {container['name']} has no command, and process nodes do not read images, so its "
                "entrypoint is not known. To fix: set command."
            )
        if "restartPolicy" in container:
            raise ConfigurationError(
                f"container {container['name']} has a restartPolicy of its own (a sidecar), which "
                "process nodes do not emulate. To fix: make it one of containers."
            )
        home = self.folder / "containers" / container["name"]
        temporary = self.folder / "tmp"
        for needed in (home, temporary):
            needed.mkdir(parents=True, exist_ok=True)
        mounts = mounts_of(container, self.volumes.paths, await self._sub_path_variables(container))
        termination = home / "termination-log"
        places = {**mounts, container.get("terminationMessagePath", DEFAULT_TERMINATION_PATH): termination}

        given = {
            **base_environment(pod=self.pod, address=self.address, home=home, temporary=temporary),
            **self._cluster_environment(mounts, home),
            **await self._node_environment(container["name"]),
            **{
                mount_variable(mount["name"]): str(mounts[mount["mountPath"]])
                for mount in container.get("volumeMounts") or []
            },
            TERMINATION_VARIABLE: str(termination),
        }
        declared, literal = await self._declared(container, given)
        environment = {
            **given,
            **{k: translate(v, places) if k in literal else v for k, v in declared.items()},
        }
        words = [*container["command"], *(container.get("args") or [])]
        # Paths are put in first: what $(NAME) brings in is real already.
        argv = tuple(expand(translate(word, places), environment) for word in words)
        folder = Path(translate(container["workingDir"], places)) if container.get("workingDir") else home
        if self.warm_start is not None:
            environment |= await self.warm_start.variables(argv, environment)
        return Command(
            argv=argv,
            environment=environment,
            folder=folder,
            log=self.log_folder / container["name"] / f"{run}.log",
        )

    async def _declared(
        self, container: Manifest, known: Mapping[str, str]
    ) -> tuple[dict[str, str], frozenset[str]]:
        return await declared_environment(
            container,
            self.pod,
            References(self.host_api, self.pod["metadata"]["namespace"]),
            known,
            address=self.address,
            host_address=self.host_address,
        )

    async def _sub_path_variables(self, container: Manifest) -> dict[str, str]:
        """Variables that ``subPathExpr`` may refer to, those that the container declares."""
        if not any(mount.get("subPathExpr") for mount in container.get("volumeMounts") or []):
            return {}
        return (await self._declared(container, {}))[0]

    def _cluster_environment(self, mounts: Mapping[str, Path], home: Path) -> dict[str, str]:
        """Address of the API server, and the pod's own credentials where it is given a token."""
        server = urlsplit(self.host_api.server)
        variables = {
            "KUBERNETES_SERVICE_HOST": server.hostname or "",
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        account = mounts.get(MOUNT_PATH)
        if account is not None and (account / "token").is_file():
            path = home / "kubeconfig"
            write_kubeconfig(
                path,
                server=self.host_api.server,
                authority=self.host_api.authority.encode(),
                user={"tokenFile": str(account / "token")},  # which is kept fresh
                namespace=self.pod["metadata"]["namespace"],
            )
            variables["KUBECONFIG"] = str(path)
        return variables

    async def _node_environment(self, container: str) -> dict[str, str]:
        variables = dict(self.node.environment)
        # As it is now: `kubectl annotate node` changes the speed of the pods that start from then on.
        try:
            node = await self.host_api.call_until_reached("GET", f"/api/v1/nodes/{self.node.name}")
        except ApiError as error:  # the Node was deleted, and its pods are going
            raise ConfigurationError(str(error)) from error
        if slowdown := (node["metadata"].get("annotations") or {}).get(EMULATED_SLOWDOWN_ANNOTATION):
            variables[SLOWDOWN_VARIABLE] = slowdown
        # "void", as NVIDIA's runtime has it for a container that may see none.
        held = self.devices.get(container, ())
        variables["NVIDIA_VISIBLE_DEVICES"] = ",".join(str(index) for index in held) or "void"
        return variables
