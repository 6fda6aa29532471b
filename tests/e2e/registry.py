"""A registry of one image, which hands it out only when the test says so."""

import base64
import hashlib
import http.server
import json
import re
import tarfile
import threading
from pathlib import Path

from ballast_localcluster.kubelets.agent import REGISTRIES

_DRIP_SECONDS = 0.2
"""Between two bytes of an image that is held back: a client that sees none for long gives up."""
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"


class Registry(http.server.ThreadingHTTPServer):
    """Serves the image of an archive, as ``docker save`` writes it, by any name and tag but ``absent``.

    A context manager.

    Args:
        address: this machine's, towards the nodes.
        archive: the image's; its configuration gets a label, so that no node has it yet.
    """

    daemon_threads = True

    def __init__(self, address: str, archive: Path) -> None:
        super().__init__((address, 0), _Answers)
        self.name = f"{address}:{self.server_port}"
        self.released = threading.Event()
        self.account = ""
        """``name:password`` that it asks for; empty: it serves anybody."""
        with tarfile.open(archive) as outer:
            (said,) = json.load(outer.extractfile("manifest.json"))
            image = json.load(outer.extractfile(said["Config"]))
            layers = [outer.extractfile(name).read() for name in said["Layers"]]
        image["config"]["Labels"] = {"served-by": self.name}
        self.blobs = {}
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST}
        manifest |= {"config": self._add(_CONFIG, json.dumps(image).encode())}
        manifest |= {"layers": [self._add(_LAYER, layer) for layer in layers]}
        self.config, self.manifest = manifest["config"]["digest"], json.dumps(manifest).encode()

    def _add(self, kind: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def known_to(self, disk: Path) -> None:
        """Tell the container runtime of a node, by its disk, that the registry speaks plain HTTP."""
        folder = disk / REGISTRIES / self.name
        folder.mkdir(parents=True, exist_ok=True)
        address = f"http://{self.name}"
        (folder / "hosts.toml").write_text(f'server = "{address}"\n[host."{address}"]\n')

    def __enter__(self) -> "Registry":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *words: object) -> None:
        """Nothing: pytest shows what a failed test printed."""

    def _answer(self, *, body: bool) -> None:
        account = f"Basic {base64.b64encode(self.server.account.encode()).decode()}"
        if self.server.account and self.headers.get("Authorization") != account:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="registry"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^?]+).*", self.path)
        data, digest, kind = b"{}", "", "application/json"
        if asked:
            name, what, digest = asked.groups()
            found = self.server.manifest if what == "manifests" else self.server.blobs.get(digest)
            if name == "absent" or found is None:
                self.send_error(404)
                return
            kind = _MANIFEST if what == "manifests" else "application/octet-stream"
            data, digest = found, f"sha256:{hashlib.sha256(found).hexdigest()}"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if not body:
            return
        sent = 0
        while digest == self.server.config and not self.server.released.wait(_DRIP_SECONDS):
            self.wfile.write(data[sent : sent + 1])
            self.wfile.flush()
            sent = min(sent + 1, len(data))
        self.wfile.write(data[sent:])
