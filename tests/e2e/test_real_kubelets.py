"""The chart, its images and trainers on real kubelets (`make e2e-nodes`): root, containerd and buildah.

The operator runs in its image. Trainers run in the images' base, with torch and the packages of this
environment from a volume, unless BALLAST_TRAINER_ARCHIVE names an archive of the trainer's image.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.default_nodes import default_nodes
from ballast_localcluster.errors import StartError
from ballast_localcluster.kubelets.binary import present_kubelets
from ballast_localcluster.kubelets.machine import check_machine
from ballast_localcluster.kubelets.start import RealNodes
from kubernetes import client, config

from tests.e2e.conftest import Ballast, demo_object
from tests.e2e.endless_jobs import CHECKPOINT, ENDLESS, SHRINKS, SMALL
from tests.support.waiting import WAIT_SECONDS, eventually

ROOT = Path(__file__).parents[2]
REGISTRY, VERSION = "registry.example.com/ballast", "0.1.0"
NAMESPACE = "ballast-system"
# Trainers do not run as root, and root's home is closed to them.
SITE = Path(sysconfig.get_path("purelib")).resolve()

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.xdist_group("real nodes"),
    pytest.mark.timeout(20 * WAIT_SECONDS),
]


def needed() -> None:
    """Skip with the reason where real nodes cannot run."""
    try:
        check_machine(Path("/tmp"))
    except StartError as error:
        pytest.skip(str(error))
    if present_kubelets() is None:
        pytest.skip("kubelet is not built: `python -m ballast_localcluster.setup --kubelets` builds it once")
    if shutil.which("buildah") is None:
        pytest.skip("images are built by buildah: apt-get install buildah mmdebstrap")
    if sys.version_info[:2] != (3, 11) and not os.environ.get("BALLAST_TRAINER_ARCHIVE"):
        pytest.skip(
            "torch of this environment is for another Python than the base image's: BALLAST_TRAINER_ARCHIVE"
        )


class RealBallast(Ballast):
    """The chart's release on real nodes, and jobs whose pods run in containers."""

    def real_job(self, name: str, called: str, **spec):
        """One of the demo's jobs, with a trainer's image and a folder of this machine as its volume."""
        job = self.demo_job(name, called, **spec)
        (volume,) = job["spec"]["template"]["spec"]["volumes"]
        folder = Path(volume["hostPath"]["path"])
        folder.mkdir(parents=True)
        folder.chmod(0o777)  # kubelet makes subPathExpr's folder as root, with this mode
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["resources"] = {"requests": {"cpu": "50m", "memory": "200Mi"}}
        container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
        if archive := os.environ.get("BALLAST_TRAINER_ARCHIVE"):
            container["image"] = f"{REGISTRY}/{Path(archive).stem}:{VERSION}"
            return job
        paths = [SITE, ROOT / "policies", ROOT / "trainer-image"]
        mounts = container.setdefault("volumeMounts", [])
        for number, path in enumerate(paths):
            source = {"name": f"path{number}", "hostPath": {"path": str(path)}}
            job["spec"]["template"]["spec"]["volumes"].append(source)
            mounts.append({"name": f"path{number}", "mountPath": str(path), "readOnly": True})
        container["env"].append({"name": "PYTHONPATH", "value": ":".join(map(str, paths))})
        container["command"] = ["python3", "-m", "ballast_trainer", "pod"]
        container["securityContext"] = {"runAsUser": 65532}
        container["image"] = f"{REGISTRY}/runtime:{VERSION}"
        return job

    def kubectl(self, *words: str) -> str:
        """What kubectl printed."""
        command = [self.cluster.kubectl, "--kubeconfig", self.cluster.kubeconfig, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * WAIT_SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def archives():
    """The images, built from the Dockerfile; unchanged layers come from buildah's storage."""
    needed()
    given = os.environ.get("BALLAST_TRAINER_ARCHIVE")
    targets = ["operator", *([] if given else ["runtime"])]
    built = subprocess.run(
        [ROOT / "scripts" / "build-images", ROOT / "out" / "images", *targets],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert built.returncode == 0
    return tuple(Path(path) for path in [*built.stdout.split(), *([given] if given else [])])


@pytest.fixture(scope="module")
def release(archives, tmp_path_factory):
    """Helm, the cluster, and the release."""
    helm = pytest.importorskip("helm_python", reason="Helm as a library has no wheel for this machine")
    folder = tmp_path_factory.mktemp("real")
    for part in (
        folder,
        *folder.parents[:2],
    ):  # pytest's folders are this user's alone, trainers run as another
        part.chmod(0o755)
    nodes = [n for n in default_nodes() if n.name in ("v100-0", "v100-1", "p100-0")]
    with (
        LocalCluster(nodes=nodes, real_nodes=RealNodes(archives)) as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as api,
        helm.Config(kubeconfig_path=str(cluster.kubeconfig), namespace=NAMESPACE) as asked,
    ):
        values = {"image": {"repository": f"{REGISTRY}/operator"}}
        chart = str(ROOT / "charts" / "ballast")
        limit = int(WAIT_SECONDS)
        asked.install(chart, "ballast", values, namespace=NAMESPACE, create_namespace=True, timeout=limit)
        apps = client.AppsV1Api(api)
        eventually(
            lambda: apps.read_namespaced_deployment("ballast", NAMESPACE).status.ready_replicas,
            "the operator to be ready",
        )
        found = RealBallast(cluster, api, folder)
        found.apply(demo_object("demo", folder))
        yield found


def test_a_job_trains_in_containers_with_gpus_of_the_device_plugin(release):
    """Rank and pod agree on the GPU, checkpoints reach the volume, and the pod is restricted."""
    job = release.real_job("recurrent", "first", totalSteps=ENDLESS, model=SMALL, checkpoint=CHECKPOINT)
    release.apply(job)
    release.wait_for_report("first", step=3, checkpoint=5)
    pod = release.pods("first")[0]
    told = release.kubectl("exec", pod.metadata.name, "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; id -u")
    device, user = told.split()
    assert device in ("0", "1")
    assert user == "65532"
    assert list((release.folder / "checkpoints" / "first").iterdir())
    release.end_job("first")


def test_a_job_that_shrinks_gives_its_pods_back(release):
    """The released pods end, and the survivors train on without a restart."""
    release.apply(release.real_job("transformer", "shrinks", **SHRINKS, checkpoint=CHECKPOINT))
    eventually(lambda: release.status("shrinks").get("repacks"), "a repack")
    repack = release.status("shrinks")["repacks"][0]
    released = set(repack["releasedPods"])
    eventually(
        lambda: released.isdisjoint(pod.metadata.name for pod in release.pods("shrinks")),
        "pods to be given back",
    )
    release.wait_for_report("shrinks", step=repack["step"] + 3)
    assert release.status("shrinks")["launches"] == 1
    release.end_job("shrinks")
