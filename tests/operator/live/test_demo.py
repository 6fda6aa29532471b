"""``ballast demo`` on a cluster of somebody, ended early."""

import tempfile

import pytest
from ballast_operator.demo.run import run_demo

from tests.operator.live.conftest import JOBS
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def test_control_c_leaves_neither_jobs_on_gpus_nor_files(live_cluster, stage, tmp_path, monkeypatch):
    """Nobody looks after the jobs any more; the folder has the operator's credentials.

    A job of somebody with the name of one that the demo would have made later stays.
    """
    stage.add_command("recurrent", ranks=1, total=1, suspend=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def jobs():
        found = stage.custom.list_namespaced_custom_object(namespace=stage.namespace, **JOBS)["items"]
        return [item["metadata"]["name"] for item in found]

    def end(_recorder):
        seen.extend(jobs())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(
            kubeconfig=live_cluster.kubeconfig,
            namespace=stage.namespace,
            announce=lambda text: None,
            on_change=end,
        )
    assert seen == ["recurrent", "transformer"]
    eventually(
        lambda: jobs() == ["recurrent"] and not stage.core.list_namespaced_pod(stage.namespace).items,
        "the demo's jobs to go",
    )
    policies = stage.custom.list_cluster_custom_object(**{**JOBS, "plural": "clusterpolicies"})["items"]
    assert [item["metadata"]["name"] for item in policies] == ["live"]
    assert list(tmp_path.glob("ballast-*")) == []
