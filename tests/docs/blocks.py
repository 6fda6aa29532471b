"""The fenced blocks of the README and of the documentation's pages."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts),
)
FENCE = re.compile(r"^([ ]*)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        where: page and line, for messages.
        language: of the fence.
        text: without the fence and its indentation.
    """

    where: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types: those that begin with a dollar, without comments."""
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return [re.sub(r"\s+#.*", "", line).strip() for line in lines]

    @property
    def folder(self) -> str:
        """The folder that its first line changes to, below the checkout."""
        first = self.commands[:1]
        return first[0].removeprefix("cd ") if first and first[0].startswith("cd ") else "."


def blocks(*languages: str) -> list[Block]:
    """Every block in one of ``languages``."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            indent, language, body = match.groups()
            if language not in languages:
                continue
            line = text[: match.start()].count("\n") + 1
            dedented = "\n".join(row.removeprefix(indent) for row in body.splitlines())
            where = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(where=where, language=language, text=dedented))
    return found
