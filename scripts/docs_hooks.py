"""Hooks of the documentation's build (mkdocs.yml): the root's pages, and links that leave ``docs/``."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/ballast-dev/ballast/blob/main/"
LINK = re.compile(r"(!?\[[^\]]*\]\()((?:\.\./)+[^)#\s]+)([^)]*\))")
# Pages in the repository's root that are pages of the site, too.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages, their links seen from ``docs/``; a link of the lab to no file stops the build."""
    for source, target in ROOT_PAGES.items():
        text = (ROOT / source).read_text()
        text = re.sub(r"\]\(docs/", "](", text)
        text = re.sub(r"\]\((?!https?:|#|[a-z]+\.md|decisions/|tasks/)([^)]+)\)", r"](../\1)", text)
        files.append(File.generated(config, target, content=text))
    for lab_page in (ROOT / "lab" / "docs").glob("*.md"):
        for path in re.findall(r"\]\((?!https?:|#)([\w./-]+)", lab_page.read_text()):
            if "." in path and not (lab_page.parent / path).exists():
                raise PluginError(f"lab/docs/{lab_page.name}: the link {path} leads nowhere")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside ``docs/`` into links to the repository; a missing file stops the build."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: the link {link[2]} leads nowhere")
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        return f"{link[1]}{REPOSITORY}{target.relative_to(ROOT)}{link[3]}"

    return LINK.sub(outside, markdown)
