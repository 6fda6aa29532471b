"""What stands in a container's command: paths of its mounts, and variables."""

from pathlib import Path

import pytest
from ballast_localcluster.nodes.containers.commands import mount_variable, translate
from ballast_localcluster.nodes.pod_resources.environment import expand
from hypothesis import given
from hypothesis import strategies as st

MOUNTS = {"/data": Path("/real/data"), "/data/inner": Path("/real/inner"), "/etc/config": Path("/c")}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/data", "/real/data"),
        ("/data/file", "/real/data/file"),
        ("/data/inner/file", "/real/inner/file"),
        ("--path=/data", "--path=/real/data"),
        ("cat '/etc/config/a'; ls /data", "cat '/c/a'; ls /real/data"),
        ("file:///data/x", "file:///data/x"),
        ("/database", "/database"),
        ("/my/data", "/my/data"),
        ("/data-old", "/data-old"),
        ("/data/innermost", "/real/data/innermost"),
        ("nothing", "nothing"),
    ],
)
def test_container_paths_become_real_ones_where_they_stand_whole(text, want):
    """At a word's beginning and up to a slash or the end; the longest mount wins."""
    assert translate(text, MOUNTS) == want


@pytest.mark.slow
@given(st.text())
def test_without_mounts_a_text_stays_as_it_is(text):
    assert translate(text, {}) == text


def test_a_mounts_variable_is_a_legal_name():
    """Dashes and dots of a volume's name become underscores."""
    assert mount_variable("my-data.2") == "BALLAST_MOUNT_MY_DATA_2"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(NONE)", "$(NONE)"),
        ("$$(A)", "$(A)"),
        ("$$$$", "$$"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
    ],
)
def test_variables_expand_as_kubernetes_has_it(text, want):
    """$(NAME) by its value, unknown names and shell syntax left alone, $$ for a dollar."""
    assert expand(text, {"A": "1", "B": "2"}) == want
