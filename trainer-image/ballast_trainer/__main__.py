"""``python -m ballast_trainer`` is ``ballast-train``."""

from ballast_trainer.cli.main import main

main()
