"""``python -m ballast_trainer``, the same program as ``ballast-train``."""

from ballast_trainer.cli.main import main

if __name__ == "__main__":
    main()
