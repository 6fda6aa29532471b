"""Arena's traces: files in the form of its artifact, made by hand."""

import json

import pytest
from ballast_lab.arena import main
from ballast_operator.cli.simulate.command import simulate
from click.testing import CliRunner

HEADER = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,gpu_type"
TABLE = {
    "bert_1B_128": {"1_a40_1_n_2_d": 1.0, "2_a40_2_n_1_d": 2.0, "2_a40_2_n_2_d": None, "1_v100_1_n_1_d": 4.0},
    "moe_9B_256": {"1_v100_1_n_1_d": -1.0},
}


@pytest.fixture
def folder(tmp_path):
    """Two A40s and a V100; of three jobs one fits nowhere, and one arrives when the simulation is over."""
    (tmp_path / "optimal_iteration_seconds.json").write_text(json.dumps(TABLE))
    (tmp_path / "resources_sim_cluster_spec.json").write_text(
        '[{"a40": {"node_num": 1}, "v100": {"node_num": 1}}]'
    )
    rows = [
        "a,1000,1500,bert__1B,0,128,2,a40",
        "b,1000,10,moe__9B,0,256,1,a40",
        "c,9999,5,bert__1B,0,128,2,a40",
    ]
    (tmp_path / "traces_simulate_trace_x.csv").write_text("\n".join([HEADER, *rows]))
    (tmp_path / "published_jct_summary.json").write_text('{"x": {"crius": [{"jobs": 7, "mean_s": 12.0}]}}')
    return tmp_path


def lines(folder, *options):
    done = CliRunner().invoke(main, ["--data", str(folder), *options])
    assert done.exit_code == 0, done.output
    return [line.split() for line in done.output.splitlines()[1:]]


def test_jobs_run_on_the_shapes_that_fit_and_those_that_end_in_time_are_counted(folder):
    """300 of 1500 steps, on two A40s of one node; the job that fits nowhere waits until the end."""
    ours, sia, published = lines(folder, "--rounds", "3")
    assert ours[1:] == ["completion-time", "1", "2", "300", "600"]
    assert sia[1:] == ["sia", "1", "2", "300", "600"]
    assert published == ["x", "arena", "7", "12"]


def test_the_file_that_it_writes_is_one_of_ballast_simulate(folder, tmp_path):
    """Jobs that fit nowhere are left out; --until counts those that have ended. A gang has one least size."""
    lines(folder, "--write", str(tmp_path / "arena.json"))
    command = ["--elastic", str(tmp_path / "arena.json"), "--policy", "completion-time", "--output", "json"]
    for until, seconds, rules in (("900", 300.0, []), ("1500", 1200.0, ["--rules", "ballast"])):
        done = CliRunner().invoke(simulate, [*command, "--round", "300", "--until", until, *rules])
        assert done.exit_code == 0, done.output
        result = json.loads(done.output)
        assert (result["jobs_measured"], result["jobs_unfinished"]) == (1, 1)
        assert result["average_jct_seconds"] == pytest.approx(seconds)
    done = CliRunner().invoke(simulate, [*command, "--until", "200"])
    assert "none of 2 jobs ends within 200 s" in done.output


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        (
            "traces_simulate_trace_x.csv",
            f"{HEADER}\na,soon,5,bert__1B,0,128,2,a40",
            ":2: submission_time: 'soon'",
        ),
        ("traces_simulate_trace_x.csv", f"{HEADER}\na,5", ":2: there is no num_iteration"),
        ("optimal_iteration_seconds.json", '{"m_1": {"two": 1}}', "m_1: 'two' is no shape"),
        ("optimal_iteration_seconds.json", '{"m_1": {"1_a_1_n_1_d": "x"}}', "1_a_1_n_1_d: 'x' is no number"),
        ("resources_sim_cluster_spec.json", '{"a40": {"node_num": 0}}', "a40: 0 is no number of nodes"),
        ("resources_sim_cluster_spec.json", "[]", "'[]' is no object"),
        ("optimal_iteration_seconds.json", '{"m_1": 3}', "m_1: 3 has no shapes"),
    ],
)
def test_what_cannot_be_read_is_refused_with_file_line_and_value(folder, file, text, named):
    (folder / file).write_text(text)
    done = CliRunner().invoke(main, ["--data", str(folder)])
    assert done.exit_code == 1
    assert f"{file}" in done.output and named in done.output
