"""``ballast demo`` on a cluster of somebody, ended early."""

import tempfile

import pytest
from ballast_operator.demo.run import run_demo

from tests.operator.live.conftest import JOBS
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def test_control_c_leaves_neither_jobs_on_gpus_nor_files(live_cluster, stage, tmp_path, monkeypatch):
    """Nobody looks after the jobs any more; the folder has the operator's credentials."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def end(_recorder):
        seen.extend(stage.custom.list_namespaced_custom_object(namespace=stage.namespace, **JOBS)["items"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(
            kubeconfig=live_cluster.kubeconfig,
            namespace=stage.namespace,
            announce=lambda text: None,
            on_change=end,
        )
    assert seen
    eventually(
        lambda: (
            not stage.custom.list_namespaced_custom_object(namespace=stage.namespace, **JOBS)["items"]
            and not stage.core.list_namespaced_pod(stage.namespace).items
        ),
        "the demo's jobs to go",
    )
    policies = stage.custom.list_cluster_custom_object(**{**JOBS, "plural": "clusterpolicies"})["items"]
    assert [item["metadata"]["name"] for item in policies] == ["live"]
    assert list(tmp_path.glob("ballast-*")) == []
