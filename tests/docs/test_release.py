"""The scripts of a release."""

import re
import shutil
import subprocess

import pytest

from tests.docs.blocks import ROOT

FILES = (
    "policies/pyproject.toml",
    "operator/pyproject.toml",
    "trainer-image/pyproject.toml",
    "client/pyproject.toml",
    "localcluster/pyproject.toml",
    "lab/pyproject.toml",
    "uv.lock",
    "charts/ballast/Chart.yaml",
    "CHANGELOG.md",
    "scripts/set-version",
    "scripts/changelog-section",
)

pytestmark = pytest.mark.processes


@pytest.fixture
def release(tmp_path):
    """A copy of what a release writes, and a function that runs one of its scripts there."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def run(script, *arguments):
        return subprocess.run(
            [tmp_path / "scripts" / script, *arguments], text=True, capture_output=True, check=False
        )

    run.folder = tmp_path
    return run


def test_a_tags_version_is_written_everywhere(release):
    """Packages, their pins of each other, the lock file and the chart."""
    assert release("set-version", "7.8.9").returncode == 0
    for name in FILES[:6]:
        text = (release.folder / name).read_text()
        assert 'version = "7.8.9"' in text
        assert set(re.findall(r"ballast-[a-z]+(?:\[[a-z]+\])?==([^\"]+)", text)) <= {"7.8.9"}
    lock = (release.folder / "uv.lock").read_text()
    assert set(re.findall(r'name = "ballast-[a-z]+"\nversion = "([^"]+)"', lock)) == {"7.8.9"}
    chart = (release.folder / "charts/ballast/Chart.yaml").read_text()
    assert "\nversion: 7.8.9\n" in chart
    assert '\nappVersion: "7.8.9"' in chart


def test_a_release_candidate_of_the_chart_has_a_semantic_version(release):
    """Helm refuses 1.0.0rc1."""
    assert release("set-version", "1.0.0rc1").returncode == 0
    assert "\nversion: 1.0.0-rc.1\n" in (release.folder / "charts/ballast/Chart.yaml").read_text()


@pytest.mark.parametrize("version", ["v1.0.0", "1.0", "latest", "1.0.0; rm -rf ."])
def test_what_is_no_version_is_refused(release, version):
    before = (release.folder / "uv.lock").read_text()
    assert release("set-version", version).returncode != 0
    assert (release.folder / "uv.lock").read_text() == before


def test_the_changelog_has_a_section_for_the_release_notes(release):
    """A version without a section stops the release."""
    assert "`TrainingJob` and `ClusterPolicy`" in release("changelog-section", "Unreleased").stdout
    log = release.folder / "CHANGELOG.md"
    log.write_text("## 1.0.0rc1\nfirst\n## 1.0.0 (today)\nwhole\n## 0.1.0\nold\n")
    assert release("changelog-section", "1.0.0").stdout == "whole\n"
    refused = release("changelog-section", "9.9.9")
    assert refused.returncode != 0
    assert "no section '## 9.9.9'" in refused.stderr
