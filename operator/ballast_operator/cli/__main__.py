"""``python -m ballast_operator.cli``: the ``ballast`` program without its script."""

from ballast_operator.cli.main import main

if __name__ == "__main__":
    main(prog_name="ballast")
