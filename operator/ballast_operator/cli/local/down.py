"""``ballast down``: stop of a local cluster."""

import click


@click.command()
@click.option("--name", default="ballast", show_default=True, help="Name of the cluster, as given to up.")
def down(name: str) -> None:
    """Stop a local cluster: its pods, its control plane, its files."""
    from ballast_localcluster.background import down as stop
    from ballast_localcluster.background import names
    from ballast_localcluster.errors import LocalClusterError

    try:
        stopped = stop(name)
    except (LocalClusterError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    if not stopped:
        others = ", ".join(names())
        raise click.ClickException(
            f"no cluster {name!r} runs here" + (f"; these do: {others}" if others else "")
        )
    click.echo(f"Cluster {name} is down, and nothing of it is left.")
