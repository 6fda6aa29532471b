"""YAML of people: numbers and texts as kubectl has them, and what is refused at once."""

import pytest
import yaml
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import Limits
from ballast_policies.contract.yaml_text import parse_documents, parse_yaml

MERGES = "a: &a {k: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join(['*' + ('a' if n == 0 else f'b{n - 1}')] * 9)}]}}\n" for n in range(12)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("4.0e10", 4e10),
        ("-1_000", -1000),
        ("0x1f", 31),
        ("017", 15),
        ("08", 8.0),
        ("0O17", 15),
        ("0B1_1", 3),
        ("+0X1f", 31),
        ("0x", "0x"),
        ("0_8", 8.0),
        ("9223372036854775808", 2**63),
        ("18446744073709551616", 2.0**64),
        ("0xfffffffffffffffff", "0xfffffffffffffffff"),
        ("1e400", "1e400"),
        ("1.", 1.0),
        ("+.5", 0.5),
        (".5_0", 0.5),
        ("._5", "._5"),
        ("-_1", -1),
        ("+-1", "+-1"),
        ("12:30", "12:30"),
        ("1:02:03.5", "1:02:03.5"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("yes", True),
        ("y", True),
        ("N", False),
        ("oN", "oN"),
        ("'y'", "y"),
        ("!!str 08", "08"),
        ("~", None),
        ("{on: 1, 0x10: 2, 08: 3}", {"true": 1, "16": 2, "8": 3}),
    ],
)
def test_a_scalar_is_what_kubectl_takes_it_for(text, value):
    """The values of ``YAMLToJSON`` of sigs.k8s.io/yaml 1.6.0, which kubectl 1.34 calls, for these texts."""
    (found,) = parse_yaml(f"a: {text}").values()
    assert found == value and isinstance(found, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2", "'a' is given twice"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        (MERGES, "more than 10000 keys"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ("# " + "x" * 2**20, "more than 1 MiB"),
        ("a: 1\n---\nb: 2", "2 documents"),
        ("a: !!int 08", "'08' is no number"),
        ("a: !!python/object/apply:os.getpid []", "constructor"),
    ],
    ids=lambda text: text[:12],
)
def test_what_would_be_read_wrongly_or_for_hours_is_refused(text, reason):
    with pytest.raises(ContractError, match=reason):
        parse_yaml(text)


def test_a_large_file_of_json_is_read_and_a_broken_one_named_by_its_fault():
    text = "{" + ", ".join(f'"{n}": 1' for n in range(200_000))
    assert len(parse_yaml(text + "}")) == 200_000
    with pytest.raises(ContractError, match="not JSON"):
        parse_yaml(text)


def test_documents_of_json_are_read_as_json():
    """With tabs, and with characters whose halves are escaped, as Python's json writes them."""
    assert parse_documents('{\n\t"a": "\\ud83d\\ude00"\n}') == [{"a": "\N{GRINNING FACE}"}]
    assert parse_documents("{a: b}\n---\n{a: c}") == [{"a": "b"}, {"a": "c"}]


def test_merges_and_aliases_of_people_are_kept():
    (document,) = parse_documents("a: &a {x: 1, z: 2}\nb: {<<: *a, x: 3}\n---\n")
    assert document == yaml.safe_load("a: {x: 1, z: 2}\nb: {x: 3, z: 2}")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_text_in_each_encoding_that_editors_write(tmp_path, encoding):
    file = tmp_path / "file"
    file.write_bytes("größe: 1\r\n".encode(encoding))
    assert parse_yaml(Limits(most_bytes=100).read(file)) == {"größe": 1}


@pytest.mark.parametrize(
    ("data", "reason"), [(b"\xe9", "not UTF-8"), (b"x" * (1 + 2**20), "more than 1 MiB. To fix")]
)
def test_a_file_that_is_no_text_or_has_no_end_is_refused_by_its_reason(tmp_path, data, reason):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ContractError, match=reason):
        Limits(most_bytes=2**20).read(tmp_path / "file")
