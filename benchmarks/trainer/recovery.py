"""The cost of recovery: a dead rank, a hung rank, a checkpoint, a restart with another number of ranks.

Four ranks over gloo on this machine train a small GPT (examples/trainer/freezing.yaml without its
changes).  Printed, each the median of several runs:

- dead: from SIGKILL of one rank to the moment the other three have ended by themselves (PeerLost);
- hung: from SIGSTOP of one rank to the same, beside the limit that the heartbeat was given;
- save: how long training stands still for a checkpoint, as the trainer reports it;
- stop: from SIGTERM of one rank to the end of all four with the state saved;
- restart: from the command to the first step after the checkpoint, with 4, 3 and 2 ranks.

    OMP_NUM_THREADS=1 python benchmarks/trainer/recovery.py
"""

import argparse
import json
import multiprocessing
import signal
import statistics
import tempfile
import time
from pathlib import Path

import yaml
from harness import Gang

EXAMPLE = Path(__file__).parents[2] / "examples/trainer/freezing.yaml"
RANKS = 4
PEER_LOST, STOPPED = 76, 75


def config(folder, **fields):
    read = yaml.safe_load(EXAMPLE.read_text())
    read.pop("dynamics"), read.pop("repack")
    return {
        **read,
        "totalSteps": 100_000,
        "rebalance": {"enabled": False},
        "checkpoint": {"path": str(folder / "saved"), "everySteps": 5},
        **fields,
    }


def gang(folder, number, value, ranks=RANKS, hang_seconds=None):
    variables = {} if hang_seconds is None else {"BALLAST_HANG_SECONDS": str(hang_seconds)}
    return Gang.run(folder / f"gang-{number}", value, ranks=ranks, variables=variables)


def end_of(made, names, code):
    """The moment at which the named processes have ended; each must end with ``code``."""
    sentinels = {made.processes[name].sentinel: name for name in names}
    while sentinels:
        for ready in multiprocessing.connection.wait(list(sentinels), timeout=120):
            del sentinels[ready]
    at = time.perf_counter()
    codes = {name: made.exit_code(name) for name in names}
    if set(codes.values()) != {code}:
        raise SystemExit(f"exit codes {codes}, expected {code}:\n{made.errors()}")
    return at


def loss_of_a_rank(folder, number, sent, hang_seconds=None):
    made = gang(folder, number, config(folder / f"job-{number}"), hang_seconds=hang_seconds)
    made.wait_for_step(8)
    victim = f"rank-{1 + number % (RANKS - 1)}"
    began = time.perf_counter()
    made.signal(victim, sent)
    ended = end_of(made, [name for name in made.processes if name != victim], PEER_LOST)
    made.close()
    return ended - began


def stop_and_restarts(folder, number):
    job = folder / f"job-{number}"
    made = gang(folder, number, config(job))
    made.wait_for_step(22)
    began = time.perf_counter()
    made.signal("rank-2", signal.SIGTERM)
    stop = end_of(made, list(made.processes), STOPPED) - began
    saves = [event["pause_ms"] for event in made.events("checkpoint")]
    made.close()
    restarts = {}
    for ranks in (4, 3, 2):
        began = time.perf_counter()
        made = gang(folder, f"{number}-{ranks}", config(job), ranks=ranks)
        made.wait_for_step(1)
        restarts[ranks] = time.perf_counter() - began
        if made.events("launch")[0]["resumed_from_step"] is None:
            raise SystemExit(f"nothing was resumed:\n{made.errors()}")
        made.signal("rank-0", signal.SIGTERM)
        made.exit_codes()
        made.close()
    return stop, saves, restarts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--hang-seconds", type=float, nargs="*", default=[3.0, 20.0])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first gang starts the server that the others are forked from.
        loss_of_a_rank(folder, 0, signal.SIGKILL)
        dead = [loss_of_a_rank(folder, 1 + i, signal.SIGKILL) for i in range(arguments.times)]
        hung = {
            limit: loss_of_a_rank(folder, 20 + i, signal.SIGSTOP, hang_seconds=limit)
            for i, limit in enumerate(arguments.hang_seconds)
        }
        stops, saves, restarts = [], [], []
        for number in range(arguments.times):
            stop, saved, restarted = stop_and_restarts(folder, 40 + number)
            stops.append(stop)
            saves += saved
            restarts.append(restarted)
    result = {
        "benchmark": "trainer_recovery",
        "ranks": RANKS,
        "dead_rank_all_others_ended_ms": [round(second * 1000) for second in dead],
        "dead_rank_limit_ms": 1000,
        "hung_rank_all_others_ended_s": {f"limit {limit:g} s": round(s, 1) for limit, s in hung.items()},
        "save_ms": {"median": round(statistics.median(saves), 1), "most": round(max(saves), 1)},
        "sigterm_to_saved_and_ended_ms": [round(second * 1000) for second in stops],
        "restart_to_first_step_s": {
            f"{ranks} ranks": round(statistics.median(one[ranks] for one in restarts), 2)
            for ranks in (4, 3, 2)
        },
        "note": "ranks are forked from a process that has torch imported; a cold start adds its import",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
