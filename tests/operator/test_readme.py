"""What the README shows can be typed."""

import re
from pathlib import Path

import yaml
from ballast_operator.api.read import read_training_job
from ballast_operator.cli.main import COMMANDS

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_training_job_is_one():
    """The YAML in the README is read without a complaint."""
    (text,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert read_training_job(yaml.safe_load(text)).metadata.name == "translator"


def test_the_readmes_links_lead_somewhere():
    """Every relative link names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_readmes_commands_exist():
    """Each `ballast COMMAND` that the README names is one."""
    named = set(re.findall(r"ballast ([a-z]+)", re.sub(r"install ballast \S+", "", README.read_text())))
    assert named
    assert named & {"demo", "explain", "top"} <= set(COMMANDS)
