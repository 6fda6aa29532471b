"""Steps and peaks of measured plans, from profiles and links: files in the form of Sailor's artifact."""

import json

import pytest
from ballast_lab.sailor import main
from click.testing import CliRunner

LINK = 1e9
MESSAGE = 2 * 2 * 2048 * 1024
"""Bytes of a microbatch of two between stages of OPT-350."""


def rows(forward, layers=4, update=0.01):
    return {str(layer): [forward, 2 * forward, update] for layer in range(layers)}


def write(folder, profiles, plans):
    (folder / "profiles").mkdir()
    for name, table in profiles.items():
        (folder / "profiles" / f"{name}.json").write_text(json.dumps(table))
    there = {gpu: {"4": [[], LINK]} for gpu in "ab"}
    zones = {"z": {gpu: {"4": {"z": there}} for gpu in "ab"}}
    (folder / "multizone_bandwidths_het.json").write_text(json.dumps(zones))
    (folder / "measured_plans.json").write_text(json.dumps(plans))


def a_plan(stages, gpus, samples=16, real=1.0):
    """``gpus``: the GPU type of each replica of each stage."""
    pipeline = {
        "layers_per_stage": stages,
        "tmp_per_stage": [[[[[g, 4, "z"]], 4] for g in of] for of in gpus],
    }
    return {"gbs": samples, "mbs": 2, "pipeline_list": [pipeline], "real": real}


def predicted(folder):
    """Plan -> seconds, as printed."""
    done = CliRunner().invoke(main, ["--data", str(folder)])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()[1:-1]]
    return {line[0]: float(line[1]) for line in lines}


def test_a_pipeline_takes_its_slowest_stage_for_each_microbatch_and_its_transfers(tmp_path):
    """8 microbatches over two stages of mixed GPUs, one boundary: activations one way, gradients back.

    Both ends have the embedding, 50,272 x 1024 words of four bytes, whose gradients they add up.
    """
    fast, slow = {"2": {"4": rows(0.1)}}, {"2": {"4": rows(0.2)}}
    plan = a_plan([[0, 1], [2, 3]], [["a"], ["b"]])
    write(tmp_path, {"OPT-350_a": fast, "OPT-350_b": slow}, {"one": plan})
    stages = [2 * 0.3 + 2 * MESSAGE / LINK, 2 * 0.6 + 2 * MESSAGE / LINK]
    step = 7 * stages[1] + sum(stages) + 4 * 50272 * 1024 / LINK + 0.02
    assert predicted(tmp_path)["one"] == pytest.approx(step, abs=1e-3)


def test_replicas_wait_for_the_slowest_and_reduce_their_gradients(tmp_path):
    """Tied embeddings count once: 50,272 x 1024 words and two layers of 12 x 1024^2, four bytes each."""
    fast, slow = {"2": {"4": rows(0.1)}}, {"2": {"4": rows(0.2)}}
    write(tmp_path, {"OPT-350_a": fast, "OPT-350_b": slow}, {"one": a_plan([[0, 1, 2, 3]], [["a", "b"]])})
    reduced = 2 * (1 / 2) * 4 * (50272 * 1024 + 2 * 12 * 1024**2) / LINK
    assert predicted(tmp_path)["one"] == pytest.approx(4 * 4 * 0.6 + 0.04 + reduced, abs=1e-3)


@pytest.mark.parametrize("update", [0.01, 0.0])
def test_a_profile_that_repeats_another_models_is_scaled_from_other_gpus(tmp_path, update):
    """The small model is twice as fast on b: so is the large one, whose own profile is of a.

    Some profiles of the artifact have no updates.
    """
    small, large = {"2": {"4": rows(0.1, update=update)}}, {"2": {"4": rows(0.5, layers=6, update=update)}}
    there = {"2": {"4": rows(0.05)}}
    write(
        tmp_path,
        {"OPT-350_a": small, "OPT-350_b": there, "GPT-Neo-2.7_a": large, "GPT-Neo-2.7_b": there},
        {"GPT-NEO": a_plan([list(range(6))], [["b"]], samples=2)},
    )
    assert predicted(tmp_path)["GPT-NEO"] == pytest.approx(6 * (0.75 + update), abs=2e-3)


def test_a_smaller_microbatch_takes_no_longer_than_a_larger_one(tmp_path):
    """Where it was measured so, the larger one counts."""
    table = {"2": {"4": rows(0.3)}, "4": {"4": rows(0.2)}}
    write(tmp_path, {"OPT-350_a": table}, {"one": a_plan([[0, 1, 2, 3]], [["a"]], samples=2)})
    assert predicted(tmp_path)["one"] == pytest.approx(4 * 0.6 + 0.04, abs=1e-3)


def test_what_is_missing_is_said_and_the_other_plans_are_predicted(tmp_path):
    """A microbatch that was not profiled; and a folder that is none."""
    other = {**a_plan([[0, 1, 2, 3]], [["a"]]), "mbs": 3}
    write(
        tmp_path, {"OPT-350_a": {"2": {"4": rows(0.1)}}}, {"x": other, "y": a_plan([[0, 1, 2, 3]], [["a"]])}
    )
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert "no profile of microbatch 3, tensor degree 4" in done.output
    assert "error of 1 steps: mean" in done.output
    found = main(["--data", str(tmp_path)], standalone_mode=False)
    assert "plans predicted" in {each.what for each in found.outside}
    (tmp_path / "measured_plans.json").write_text("{}")
    assert "has no plan" in CliRunner().invoke(main, ["--data", str(tmp_path)]).output
    (tmp_path / "measured_plans.json").write_text('{"x": {"mbs": 1}}')
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert done.exit_code == 1
    assert "is not as in Sailor's artifact" in done.output


def test_the_fullest_gpu_has_its_layers_and_the_microbatches_in_flight(tmp_path):
    """The first of two stages: an embedding and a block over four GPUs, two microbatches of two samples."""
    plan = a_plan([[0, 1], [2, 3]], [["a"], ["a"]]) | {"max_mem": 5e9}
    write(tmp_path, {"OPT-350_a": {"2": {"4": rows(0.1)}}}, {"one": plan})
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert done.exit_code == 0, done.output
    first = 18 * (50272 * 1024 + 12 * 1024**2) / 4
    first += 2 * 2 * 2048 * 1024 * (10 + 24 / 4 + 5 * 16 * 2048 / (1024 * 4))
    last = 18 * (50272 * 1024 + 12 * 1024**2) / 4
    last += 2 * 2048 * (1024 * (10 + 24 / 4 + 5 * 16 * 2048 / (1024 * 4)) + 14 * 50272 / 4)
    line = done.output.splitlines()[1].split()
    assert float(line[4]) == pytest.approx((4.5e9 + max(first, last) + 3 * MESSAGE) / 1e9, abs=0.006)
    assert "error of 1 peak bytes: mean" in done.output
