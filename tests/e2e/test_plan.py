"""A plan of ``ballast plan`` on a cluster: the fields that it prints are applied as they are."""

import pytest
import yaml
from ballast_operator.cli.main import main
from click.testing import CliRunner

from tests.e2e.endless_jobs import ELASTIC, ENDLESS, SMALL
from tests.support.waiting import eventually

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


ROW = {"backwardSeconds": 0.02, "heldBytes": 4e8, "weightBytes": 1e8, "outputBytes": 1e3}
PLANNED = {
    **ELASTIC,
    "repack": {"enabled": False},
    "rebalance": {"enabled": False},
    "planner": {
        # Half of the layers fit a GPU, and replicas would exchange their gradients for seconds.
        "profiles": [
            {
                "layers": [
                    {**ROW, "repeat": 6, "forwardSeconds": 0.01},
                    {**ROW, "repeat": 4, "forwardSeconds": 0.04},
                ]
            }
        ],
        "gpus": [{"gpuType": "v100", "memory": "2600M"}],
        "bandwidth": 1e8,
    },
}


def test_a_planned_gang_grows_and_gives_back_by_the_planners_splits(ballast):
    """A node announces that it goes, comes back and goes again: the gang trains on."""

    def has_its_split(gpus):
        found = ballast.status("planned").get("allocation") or {}
        if found.get("gpus") != gpus or found.get("joining"):
            return False
        stages = (ballast.report("planned") or {}).get("stages") or []
        return [of["endLayer"] - of["firstLayer"] for of in stages] == found["degrees"]["layers"]

    with ballast.operator():
        ballast.announce_end("v100-1")
        ballast.apply(ballast.demo_job("transformer", "planned", **PLANNED))
        ballast.wait_for_report("planned", step=3)
        eventually(lambda: has_its_split(2), "two stages as planned")
        ballast.stay("v100-1")
        eventually(lambda: has_its_split(4), "four stages as planned")
        ballast.announce_end("v100-1")
        eventually(lambda: has_its_split(2), "two stages again")
        status = ballast.status("planned")
        assert (status["launches"], status.get("restarts", {})) == (1, {})
        ballast.end_job("planned")
        ballast.stay("v100-1")


def test_the_best_plans_are_tried_in_the_first_steps_and_the_fastest_goes_on(ballast):
    """Schedules and cuts, by real ranks; the next launch on the same GPUs has what was kept at once."""
    fields = {
        **PLANNED,
        "rebalance": {"everySteps": ENDLESS},
        "pipeline": {**ELASTIC["pipeline"], "maxStages": 2},
        "planner": {**PLANNED["planner"], "trial": 3},
    }

    def kept():
        trial = ballast.status("tried").get("trial") or {}
        return trial if "kept" in trial else None

    def trains_by(plan):
        stages = (ballast.report("tried") or {}).get("stages") or []
        return [of["endLayer"] - of["firstLayer"] for of in stages] == plan["layers"]

    with ballast.operator():
        ballast.apply(ballast.demo_job("transformer", "tried", **fields))
        trial = eventually(kept, "three plans are tried")
        measured = [one["stepSeconds"] for one in trial["plans"]]
        plan = trial["plans"][trial["kept"]]["plan"]
        assert len(measured) == 3 and trial["kept"] == measured.index(min(measured))
        assert len({one["plan"]["schedule"] for one in trial["plans"]}) == 3
        eventually(lambda: trains_by(plan), "the ranks go on by the fastest")
        ballast.kubectl("patch", "tj", "tried", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        eventually(lambda: not ballast.pods("tried"), "the job holds no GPUs")
        ballast.kubectl("patch", "tj", "tried", "--type=merge", "-p", '{"spec": {"suspend": false}}')
        eventually(lambda: ballast.plan("tried").launch == 2, "it is launched again")
        eventually(lambda: trains_by(plan) and ballast.report("tried")["epoch"] > 1, "by the fastest")
        status = ballast.status("tried")
        assert status["trial"] == trial and status["allocation"]["degrees"] == plan
        assert not ballast.plan("tried").candidates
        ballast.end_job("tried")
