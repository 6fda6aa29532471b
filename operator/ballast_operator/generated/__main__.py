"""``python -m ballast_operator.generated``: write the generated files below the current folder."""

import sys
from pathlib import Path

from ballast_operator.generated import generated_files


def main(root: Path) -> None:
    """Write what differs, and say what was written."""
    if not (root / "pyproject.toml").is_file():
        sys.exit(f"{root} is not the repository's root. To fix: run this where pyproject.toml is")
    for name, text in generated_files().items():
        path = root / name
        if path.is_file() and path.read_text() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {name}", file=sys.stderr)  # noqa: T201 - a program of the repository


if __name__ == "__main__":
    main(Path.cwd())
