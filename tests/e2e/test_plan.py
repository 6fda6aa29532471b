"""A plan of ``ballast plan`` on a cluster: the fields that it prints are applied as they are."""

import pytest
import yaml
from ballast_operator.cli.main import main
from click.testing import CliRunner

from tests.e2e.endless_jobs import ENDLESS, SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

PROFILE = "layers: [{repeat: 8, forwardSeconds: 0.1, backwardSeconds: 0.2, heldBytes: 10, outputBytes: 1}]"
CLUSTER = "gpus: [{type: v100, count: 1, speed: 2}, {type: p100, count: 1}]"


def test_a_plan_over_two_gpu_types_trains_with_its_layers_on_its_gpus(ballast, tmp_path):
    """One gang in two pools: the faster type has more layers."""
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    files = [str(tmp_path / name) for name in ("profile.yaml", "cluster.yaml")]
    printed = CliRunner().invoke(main, ["plan", *files, "--microbatches", "4", "--output", "yaml"])
    assert printed.exit_code == 0, printed.output
    fields = yaml.safe_load(printed.output)["spec"]
    types = [of["gpuType"] for of in fields["plan"]["gpus"]]
    layers = dict(zip(types, fields["plan"]["layers"], strict=True))
    assert layers["v100"] > layers["p100"]
    job = ballast.demo_job(
        "recurrent",
        "planned",
        totalSteps=ENDLESS,
        model=SMALL,
        gpuTypes=["v100", "p100"],
        rebalance={"enabled": False},
        **fields,
    )
    with ballast.operator():
        ballast.apply(job)
        ballast.wait_for_report("planned", step=2)
        stages = ballast.report("planned")["stages"]
        assert [of["endLayer"] - of["firstLayer"] for of in stages] == [layers[kind] for kind in types]
        parts = ballast.status("planned")["allocation"]["parts"]
        assert [(of["gpuType"], len(of["pods"])) for of in parts] == [(kind, 1) for kind in types]
        nodes = {pod.metadata.name: pod.spec.node_name for pod in ballast.pods("planned")}
        assert [nodes[of["pods"][0]].split("-")[0] for of in parts] == types
        ballast.end_job("planned")
