"""``ballast completion``: what a shell needs to complete commands and options."""

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    r"""Print the completion of commands and options for SHELL.

    \b
    bash: echo 'source <(ballast completion bash)' >> ~/.bashrc
    zsh:  echo 'source <(ballast completion zsh)' >> ~/.zshrc
    fish: ballast completion fish > ~/.config/fish/completions/ballast.fish
    """
    from click.shell_completion import get_completion_class

    from ballast_operator.cli.main import main

    found = get_completion_class(shell)
    assert found is not None
    script = found(main, {}, "ballast", "_BALLAST_COMPLETE")
    click.echo(script.source_template % script.source_vars())
