"""Images on nodes: imported once, and shared by all nodes' disks as hard links."""

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

PAUSE = "localhost/ballast-pause:1"
"""The image of every pod's first process."""


def write_pause_archive(program: Path, archive: Path) -> None:
    """Write an image that holds one program as `docker save` would, the same bytes each time."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as inner:
        entry = tarfile.TarInfo("pause")
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            inner.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    image = {
        "architecture": machine,
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, mode="w") as outer:
        for name, data in (
            ("config.json", json.dumps(image).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            outer.addfile(entry, io.BytesIO(data))


def share_images(source: Path, target: Path) -> None:
    """Give ``target`` a containerd folder with the images of ``source``.

    Layers and blobs are never changed once they are written, so they are hard links; databases are copied.
    """

    def copy(one: str, other: str) -> None:
        if one.endswith(".db"):
            shutil.copy2(one, other)
        else:
            os.link(one, other, follow_symlinks=False)

    def copy_tree(one: Path, other: Path) -> None:
        # As shutil.copytree, with owners: layers hold files of several users.
        status = one.lstat()
        other.mkdir()
        os.chown(other, status.st_uid, status.st_gid)
        for entry in os.scandir(one):
            if entry.is_dir(follow_symlinks=False):
                copy_tree(Path(entry.path), other / entry.name)
            else:
                copy(entry.path, str(other / entry.name))
        shutil.copystat(one, other)

    copy_tree(source, target)
