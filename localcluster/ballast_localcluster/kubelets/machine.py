"""Requirements of real nodes on a machine, and the control groups that they take on it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ballast_localcluster.errors import LocalClusterError, StartError
from ballast_localcluster.waiting import Limit, wait_until

_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = {"cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids"}
_CONTROLLERS_V2 = {"cpu", "cpuset", "memory", "pids"}
_PLUGIN_FOLDERS = (Path("/opt/cni/bin"), Path("/usr/lib/cni"), Path("/usr/libexec/cni"))
_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
# Debian's names; those of other distributions differ little.
_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


def check_machine(folder: Path) -> None:
    """Refuse, with everything that is missing, where real nodes cannot run.

    Args:
        folder: where they will keep containers; it may not exist yet.

    Raises:
        StartError: another system than Linux, not root, missing programs, control groups that cannot be used,
            or no overlay mounts.
    """
    if not sys.platform.startswith("linux"):
        raise StartError(f"real nodes need Linux, and this is {sys.platform}. To fix: use process nodes.")
    if os.geteuid() != 0:
        raise StartError(
            "real nodes need root, for namespaces, mounts and control groups, "
            f"and this is user {os.geteuid()}. To fix: run it with sudo, or use process nodes."
        )
    missing = {package for program, package in _PACKAGES.items() if shutil.which(program) is None}
    if plugins_folder() is None:
        missing.add("containernetworking-plugins")
    if missing:
        names = " ".join(sorted(missing))
        raise StartError(f"real nodes need {names}. To fix: apt-get install {names} (Debian, Ubuntu).")
    if words := _cgroup_fault() or _mount_fault(folder):
        raise StartError(
            f"{words}. To fix: use a machine or a privileged container where it can be, or process nodes."
        )


def plugins_folder() -> Path | None:
    """The folder of the CNI plugins; None where there is none with all that a node needs."""
    for folder in _PLUGIN_FOLDERS:
        if all(os.access(folder / name, os.X_OK) for name in _PLUGINS):
            return folder
    return None


def cgroup_name(cluster: Path, node: str = "") -> str:
    """Name of a node's control group: no two clusters of a machine have the same one."""
    return f"ballast-{hashlib.sha256(str(cluster.resolve()).encode()).hexdigest()[:8]}-{node}"


def make_cgroup(name: str) -> None:
    """Make a control group under the root of each hierarchy, with all controllers."""
    if _is_v2():
        wanted = sorted(_CONTROLLERS_V2 & _available_v2())
        (_CGROUPS / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in wanted))
        (_CGROUPS / name).mkdir(exist_ok=True)
        return
    for hierarchy in _hierarchies("cgroup"):
        (hierarchy / name).mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group, which then can hold no process
            if (hierarchy / file).exists():
                (hierarchy / name / file).write_text((hierarchy / file).read_text())


def remove_cgroups(prefix: str) -> None:
    """Remove the control groups of a prefix after their processes. Raises LocalClusterError: one stays."""
    if not sys.platform.startswith("linux"):
        return
    faults: list[OSError] = []

    def gone() -> bool:
        faults[:] = [
            fault
            for hierarchy in _hierarchies("cgroup", "cgroup2")
            for group in hierarchy.glob(f"{prefix}*")
            for folder, _, _ in os.walk(group, topdown=False)
            if (fault := _removal_fault(Path(folder)))
        ]
        return not faults

    try:
        wait_until(gone, f"the control groups {prefix}* to be empty", Limit.STOPPED)
    except TimeoutError as error:
        raise LocalClusterError(
            f"a control group stays: {faults[0]}. To fix: end the processes that its cgroup.procs lists, "
            "then remove it with rmdir."
        ) from error


def _removal_fault(group: Path) -> OSError | None:
    """Remove one group; what forbids it."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _is_v2() -> bool:
    return (_CGROUPS / "cgroup.controllers").exists()


def _available_v2() -> set[str]:
    return set((_CGROUPS / "cgroup.controllers").read_text().split())


def _hierarchies(*kinds: str) -> list[Path]:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(place) for _, place, kind, *_ in mounts if kind in kinds]


def _cgroup_fault() -> str:
    """Fault of the control groups; empty: none."""
    if _is_v2():
        lacking = _CONTROLLERS_V2 - _available_v2()
    else:
        names = {name for hierarchy in _hierarchies("cgroup") for name in hierarchy.name.split(",")}
        lacking = _CONTROLLERS - names
    if lacking:
        return f"{_CGROUPS} has no controllers {', '.join(sorted(lacking))}"
    probe = cgroup_name(Path(f"probe-{os.getpid()}"))
    try:
        make_cgroup(probe)
    except OSError as error:
        return f"no control group can be made under {_CGROUPS} ({error})"
    finally:
        remove_cgroups(probe)
    return ""


def _mount_fault(folder: Path) -> str:
    """Reason that containers' file systems cannot be mounted below ``folder``; empty: they can."""
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryDirectory(prefix="ballast-mount-", dir=folder) as scratch:
        for part in ("lower", "upper", "work", "merged"):
            (Path(scratch) / part).mkdir()
        options = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work"
        done = subprocess.run(
            [
                *["unshare", "-n", "-m", "-p", "-u", "--fork", "mount", "-t", "overlay", "-o"],
                options,
                "overlay",
                f"{scratch}/merged",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return f"no overlay can be mounted in {folder} ({done.stderr.strip()})" if done.returncode else ""
