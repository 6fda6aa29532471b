"""The stages of ``plan`` in a configuration, and of the ranks' plan: as they are, or refused in words."""

import pytest
from ballast_policies.contract import Report, Stage
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

from tests.support.one_process import train_here
from tests.support.plans import local_plan

PLAN = {"layers": [1, 5, 2]}


@pytest.mark.processes
def test_a_gang_starts_with_exactly_the_planned_layers(gang, small_config, tmp_path):
    """Not with even stages."""
    config = small_config(totalSteps=4, plan=PLAN)
    folder = tmp_path / "channel"
    running = gang(config, ranks=3, options=["--channel", str(folder)])
    assert set(running.exit_codes().values()) == {0}, running.errors()
    report = Report.from_json((folder / "report.json").read_text())
    assert [stage.end_layer for stage in report.stages] == [1, 6, 8]


@pytest.mark.parametrize(("layers", "ranks"), [([1, 5, 1], 3), ([1, 7], 3), ([1, 5, 2], 2)])
def test_a_plan_of_another_model_or_other_ranks_is_refused(small_config, layers, ranks):
    """With what the plan and the model have, where the configuration alone does not know the layers."""
    config = small_config(plan={"layers": layers})
    del config["model"]["layers"]
    config["model"]["args"]["layers"] = 8
    with pytest.raises(ConfigurationError, match=r"plan\.layers: has \d layers in \d stages; 'gpt' has 8"):
        ValidatedJob.from_mapping(config).check_ranks(ranks)


def test_stages_of_other_layers_than_the_models_are_refused(small_config):
    """Before, such a job trained with even stages, and said nothing."""
    plan = local_plan(["job-1-0"]).replace(stages=(Stage(rank=0, first_layer=0, end_layer=7),))
    with pytest.raises(ConfigurationError, match=r"plan 1 has 7 layers on ranks \[0\]; 'gpt' has 8"):
        train_here(small_config(), plan=plan)
