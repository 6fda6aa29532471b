"""Fuzz one parser for a time: ``python -m tests.fuzz.run PARSER --seconds 60``; used by ``scripts/fuzz``.

With atheris, changes that reach new branches of Ballast's code are kept and changed further. Without it,
hypothesis draws them at random. Exit code 0: no finding; 1: one, on standard error; 2: no such parser.
"""

import argparse
import logging
import random
import sys
import time
import traceback
import warnings
from typing import Any

PACKAGES = ["ballast_policies.contract", "ballast_policies", "ballast_operator", "ballast_trainer.config"]

MOST_CPU_SECONDS = 20
"""For one input; more is a finding."""

HANGS_SECONDS = 1200
"""Of the clock, for one input: a machine with other work may not turn to this process for minutes."""


def main() -> int:
    """Run it."""
    options = argparse.ArgumentParser()
    options.add_argument("parser")
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument("--corpus", default="", help="folder of inputs to start from, and to add to")
    chosen = options.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    try:
        import atheris
    except ImportError:
        return _at_random(chosen)
    return _with_coverage(atheris, chosen)


def _with_coverage(atheris: Any, chosen: argparse.Namespace) -> int:
    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.parsers import BY_NAME, attempt
    parser = BY_NAME[chosen.parser]

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        before = time.process_time()
        attempt(parser, lambda below: provider.ConsumeIntInRange(0, below - 1))
        if (took := time.process_time() - before) > MOST_CPU_SECONDS:
            raise RuntimeError(f"{parser.name} took {took:.0f} CPU s for one input")

    _say_start()
    limits = [
        f"-max_total_time={chosen.seconds}",
        "-max_len=256",
        f"-timeout={HANGS_SECONDS}",
        "-rss_limit_mb=4096",
    ]
    atheris.Setup([sys.argv[0], *limits, *filter(None, [chosen.corpus])], one)
    atheris.Fuzz()  # ends the process
    return 0


def _at_random(chosen: argparse.Namespace) -> int:
    from tests.fuzz.parsers import BY_NAME, attempt

    parser, seed, runs = BY_NAME[chosen.parser], time.time_ns(), 0
    generator = random.Random(seed)
    _say_start()
    end = time.monotonic() + chosen.seconds
    while time.monotonic() < end:
        runs += 1
        try:
            attempt(parser, generator.randrange)
        except Exception:
            traceback.print_exc()
            return 1
    sys.stderr.write(f"Done {runs} runs, at random: atheris is not installed\n")
    return 0


def _say_start() -> None:
    """What imports have cost is not time that a parser was fuzzed for."""
    sys.stderr.write(f"Started after {time.process_time():.1f} CPU s\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
