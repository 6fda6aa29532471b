"""The workflows run what they name, and run actions whose code cannot change under a tag."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_hash_with_its_version_beside_it(path):
    """A tag can be moved in the repository of the action; the version is what dependabot reads."""
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_an_action_has_the_same_hash_everywhere():
    """An update of one place alone would leave the old code in another."""
    found = {}
    for path in WORKFLOWS:
        for action, version in re.findall(r"uses: ([\w./-]+)@(.*)", path.read_text()):
            found.setdefault(action, set()).add(version)
    assert {action: versions for action, versions in found.items() if len(versions) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_files_commands_and_make_targets_that_a_workflow_names_exist(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    makefile = (ROOT / "Makefile").read_text()
    missing = []
    for job in jobs.values():
        matrix = job.get("strategy", {}).get("matrix", {})
        texts = [yaml.safe_dump(job, width=10_000)]
        for name, values in matrix.items():
            texts = [
                text.replace(f"${{{{ matrix.{name} }}}}", str(value)) for text in texts for value in values
            ]
        for text in texts:
            named = re.findall(r"(?:localcluster|charts|scripts|docs|\.ci)/[\w./*-]+", text)
            missing += [name for name in named if not exists(name)]
            targets = re.findall(r"\bmake ([a-z0-9-]+)", text)
            missing += [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    assert missing == []


def exists(name):
    """A file, a folder or a pattern; a sentence may end with it."""
    return any(list(ROOT.glob(pattern)) for pattern in (name, name.rstrip("/*").rstrip(".")))
