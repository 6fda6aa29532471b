"""Speeds whose model and GPU type were both held out, in the form of Arena's and Gavel's tables."""

import json

import pytest
from ballast_lab.unseen import Fit, arena, figures, held_out, main, sample_work
from ballast_policies.gpus.catalogue import speed_scales
from click.testing import CliRunner

GPUS = {"a100": "a100-sxm4-40gb", "v100": "v100-sxm2-16gb", "a40": "a40-48gb", "a10": "a10-24gb"}


def table(off=1.0):
    """Steps that take exactly as long as work and catalogue say; on A100s ``off`` times as long."""
    scales = speed_scales([*GPUS.values()])
    found = {}
    sizes = {"760M": 0.76, "1.3B": 1.3, "2.6B": 2.6, "6.7B": 6.7, "15B": 15.0}
    for size, parameters in sizes.items():
        shapes = {}
        for gpu, name in GPUS.items():
            for gpus in (1, 2, 4, 8):
                seconds = 50 * 128 * sample_work("bert", size, parameters) * 1e12 / scales[name] / gpus
                shapes[f"{gpus}_{gpu}_1_n_{gpus}_d"] = seconds * (off if gpu == "a100" else 1.0)
        found[f"bert_{size}_128"] = shapes | {"16_a10_8_n_2_d": None, "16_a10_16_n_1_d": -1.0}
    return found


@pytest.mark.slow
def test_nothing_of_the_model_or_the_gpu_type_is_fitted_on():
    """Where the catalogue is right the estimate is; where a type is twice as slow it is off by that alone."""
    exact = list(arena(table()))
    assert all(abs(Fit(rest).errors(test)).max() < 0.02 for test, rest in held_out(exact))
    assert figures(exact)["covered"] > 0.5
    for test, rest in held_out(list(arena(table(off=2.0)))):
        assert not {run.model for run in test} & {run.model for run in rest}
        assert not {run.gpu_type for run in test} & {run.gpu_type for run in rest}
        if test[0].gpu_type == "a100":
            assert float(Fit(rest).errors(test).mean()) == pytest.approx(-0.693, abs=0.1)


@pytest.mark.slow
def test_the_command_prints_what_it_finds(tmp_path):
    """A folder without either table is refused; one model alone cannot be held out."""
    assert "has none of" in CliRunner().invoke(main, ["--data", str(tmp_path)]).output
    (tmp_path / "arena").mkdir()
    file = tmp_path / "arena" / "optimal_iteration_seconds.json"
    file.write_text(json.dumps({"bert_1.3B_128": {"1_a100_1_n_1_d": 1.0}}))
    assert "arena: nothing can be held out" in CliRunner().invoke(main, ["--data", str(tmp_path)]).output
    file.write_text(json.dumps(table()))
    found = json.loads(CliRunner().invoke(main, ["--data", str(tmp_path), "--output", "json"]).output)
    assert found["arena"]["runs"] == 80 and found["arena"]["median_error"] < 0.02
    assert found["estimator"]["median_error"] < 0.4 and found["estimator"]["covered"] >= 0.85


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"bert_1.3B_128": {"two": 1.0}}', "cannot be read: ValueError"),
        ('{"bert_1.3B_128": {"1_tpu_1_n_1_d": 1.0}}', "['tpu'] are none of ['a100'"),
        ("[1]", "cannot be read: AttributeError"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_file(tmp_path, text, named):
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "optimal_iteration_seconds.json").write_text(text)
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert done.exit_code == 1
    assert "optimal_iteration_seconds.json" in done.output and named in done.output
