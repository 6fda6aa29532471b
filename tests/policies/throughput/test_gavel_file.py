"""Throughput tables are read as Gavel writes them, and say what they lack."""

import gzip
import json

import pytest
from ballast_policies.throughput.table import JobType, ThroughputError, built_in_table, read_table

TABLE = {"v100": {"('A3C', 1)": {"null": 2.5, "('A3C', 1)": [1.5, 1.5]}}}


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress])
def test_a_table_is_read_plain_or_gzipped(tmp_path, pack):
    """Both forms give the same numbers."""
    file = tmp_path / "table"
    file.write_bytes(pack(json.dumps(TABLE).encode()))
    table = read_table(file)
    assert table.alone(JobType(name="A3C"), "v100") == 2.5
    assert table.shared(JobType(name="A3C"), JobType(name="A3C"), "v100") == (1.5, 1.5)


def test_the_built_in_tables_are_gavels():
    """83 rows a type; a value 0 means that the job does not fit; the two differ."""
    table = built_in_table("simulation")
    assert set(table.gpu_types) == {"k80", "p100", "v100"}
    assert len(table.alone_rates["v100"]) == 83
    large = JobType(name="ResNet-50 (batch size 128)", gpus=2)
    assert table.alone(large, "k80") == 0.0
    assert table.alone(large, "v100") > table.alone(large, "p100") > 0.0
    assert table.alone(large, "v100") != table.spread(large, "v100")
    assert table.alone_rates != built_in_table("physical_cluster").alone_rates


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"nonsense", "is not JSON"),
        (b"[1]", "is not a throughput table"),
        (b'{"v100": {"(\'x\', 1)": {"alone": 1}}}', 'no number under "null"'),
        (b'{"v100": {"x": {"null": 1}}}', "'x' is not a job type"),
        (b'{"v100": {"(\'x\', 0)": {"null": 1}}}', "is not a job type"),
        (b'{"v100": {"(\'x\', 1)": {"null": NaN}}}', "nan must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": -1}}}', "-1 must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": true}}}', "True must be a number of steps/s"),
        (b'{"v100": {"(\'x\', 1)": {"null": 1, "(\'y\', 1)": [1]}}}', "[1] must be [steps/s of the first"),
        (b"[" * 100_000, "is not JSON"),
        (b"\x1f\x8bnonsense", "is not JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, what):
    """The message names the file and what is wrong."""
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(ThroughputError, match=r"broken\.json") as raised:
        read_table(file)
    assert what in str(raised.value)


def test_a_missing_row_says_which_sizes_there_are():
    """Type, size and GPU type are named."""
    table = built_in_table("simulation")
    with pytest.raises(ThroughputError, match=r"'A3C' on 2 GPUs of v100 .* on \[1\] GPUs"):
        table.alone(JobType(name="A3C", gpus=2), "v100")
    with pytest.raises(ThroughputError, match="GPU type 'h100' is not in"):
        table.alone(JobType(name="A3C"), "h100")
