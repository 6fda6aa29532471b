"""``ballast crds``: write the custom resource definitions."""

from pathlib import Path

import click

from ballast_operator.api.schema.crd import crd_files


@click.command()
@click.option(
    "--output-dir",
    default="crds",
    show_default=True,
    help="Folder to write to, one file a kind; '-' for standard output.",
)
def crds(output_dir: str) -> None:
    """Write the custom resource definitions, generated from the operator's models.

    With --output-dir - they can be piped: ballast crds --output-dir - | kubectl apply -f -
    """
    files = crd_files()
    if output_dir == "-":
        click.echo("---\n".join(files.values()), nl=False)
        return
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
            click.echo(f"wrote {folder / name}", err=True)
    except OSError as error:
        fix = "To fix: --output-dir names a folder that can be written"
        raise click.ClickException(f"{error.filename}: {error.strerror}. {fix}") from error
