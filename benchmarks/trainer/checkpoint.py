"""The pause of training for a checkpoint, with ``checkpoint.asyncMode`` and without, in one run.

Two ranks over gloo train a GPT and save it every few steps; runs of the two modes alternate.  For each mode:
the pause of a checkpoint, the time until it was whole, and the steps between two of them.

    python benchmarks/trainer/checkpoint.py [--rounds 2] [--dim 512] [--folder DIRECTORY]

``ratio`` is the median pause with ``async`` / that with ``disabled``: at most 0.04.  ``step_ratio`` is the
same of all steps' time, pauses left out: what the copy and the writing beside them cost. The first checkpoint
of a run, whose copy has yet to get its memory, counts too; the last one, for which both wait, does not.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from harness import Gang

SAVE_EVERY, SAVES = 4, 3


def run(folder: Path, mode: str, dim: int) -> dict[str, list[float]]:
    """Pauses, times to write and step times in ms of a run; and the bytes of a checkpoint."""
    config = {
        "totalSteps": SAVE_EVERY * SAVES + 2,
        "model": {"name": "gpt", "layers": 8, "args": {"dim": dim, "heads": 4, "context": 64}},
        "pipeline": {"microbatches": 2, "globalBatchSize": 4},
        "rebalance": {"enabled": False},
        "checkpoint": {"path": str(folder / "saved"), "everySteps": SAVE_EVERY, "asyncMode": mode},
    }
    ran = Gang.run(folder, config, ranks=2)
    try:
        for process in ran.processes.values():
            process.join()
        assert set(ran.exit_codes().values()) == {0}, ran.errors()
        saves = [event for event in ran.events("checkpoint") if event["step"] % SAVE_EVERY == 0]
        steps = [line["step_seconds"] * 1000 for line in ran.lines("rank-0") if "step_seconds" in line][2:]
    finally:
        ran.close()
    newest = max((folder / "saved").glob("step-*"))
    return {
        "pause_ms": [save["pause_ms"] for save in saves],
        "write_ms": [save["write_ms"] for save in saves],
        "step_ms": steps,
        "bytes": [sum(path.stat().st_size for path in newest.iterdir())],
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--folder", default=None, help="where to save: storage differs")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {"async": {}, "disabled": {}}
    for _ in range(options.rounds):
        for mode, figures in found.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                for key, values in run(Path(name), mode, options.dim).items():
                    figures.setdefault(key, []).extend(values)
    middle = {
        mode: {key: statistics.median(values) for key, values in figures.items()}
        for mode, figures in found.items()
    }
    result = {
        "checkpoint_mb": middle["async"]["bytes"] / 1e6,
        "ratio": middle["async"]["pause_ms"] / middle["disabled"]["pause_ms"],
        "step_ratio": statistics.mean(found["async"]["step_ms"])
        / statistics.mean(found["disabled"]["step_ms"]),
        **{mode: {key: figures[key] for key in ("pause_ms", "write_ms")} for mode, figures in found.items()},
    }
    print(json.dumps(result, default=float))


if __name__ == "__main__":
    main()
