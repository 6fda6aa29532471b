"""Made-up Python distributions: metadata with entry points, and modules, in a folder of ``sys.path``."""

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, name: str, group: str, entries: Mapping[str, str], modules: Mapping[str, str]
) -> None:
    """Put a distribution ``name`` 1.2 into the folder, as an installer does."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    metadata = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
