"""The sum that all ranks agree on after every step: a tree of messages against gloo's all-reduce, in one run.

    python benchmarks/trainer/agreement.py [--ranks 2 4 8 16] [--times 60]

As many numbers as a job of 12 layers sums. Every rank but 0 has waited for 20 ms when rank 0 comes, as
at the end of a pipeline's step; milliseconds on rank 0 until all ranks have the sum (a barrier included,
the same for both). ``ratio`` is all-reduce over tree, of medians. One machine: a hop costs a process switch,
and no network.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import time

NUMBERS = 53


def rank_main(rank, size, port, times, results):
    import torch
    import torch.distributed as dist
    from ballast_trainer.distributed.process_group import tree_sum

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    numbers = torch.ones(NUMBERS, dtype=torch.float64)
    sums = {
        "all_reduce": dist.all_reduce,
        "tree": lambda tensor: tree_sum(tensor, rank=rank, size=size),
    }
    seconds = {name: [] for name in sums}
    for _ in range(times):
        for name, sum_up in sums.items():
            dist.barrier()
            time.sleep(0.04 if rank == 0 else 0.02)
            mine = numbers.clone()
            began = time.perf_counter()
            sum_up(mine)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            assert mine.tolist() == [float(size)] * NUMBERS
    if rank == 0:
        results.put({name: statistics.median(values) * 1000 for name, values in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--times", type=int, default=60)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    for size in arguments.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.Queue()
        ranks = [
            context.Process(target=rank_main, args=(rank, size, port, arguments.times, results))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found = results.get(timeout=600)
        for process in ranks:
            process.join(30)
        line = {
            "benchmark": "trainer_agreement",
            "ranks": size,
            **{f"{name}_ms": round(milliseconds, 2) for name, milliseconds in found.items()},
            "ratio": round(found["all_reduce"] / found["tree"], 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
