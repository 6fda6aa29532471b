"""The commands of the Makefile exist, and are told by `make help`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_declared_command_has_a_recipe_and_a_line_of_help():
    """A command that is declared and absent would succeed without doing anything."""
    declared = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    helped = re.findall(r"^([a-z0-9-]+):.*## .+$", MAKEFILE, re.MULTILINE)
    assert sorted(declared) == sorted({*helped, "clean"})


def test_every_quick_benchmark_is_there():
    """Each line of benchmarks/quick.txt is a script and its options."""
    for line in (ROOT / "benchmarks" / "quick.txt").read_text().splitlines():
        assert (ROOT / "benchmarks" / line.split()[0]).is_file(), line
