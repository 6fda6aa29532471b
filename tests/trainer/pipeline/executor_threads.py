"""The executor's ranks as threads of one process, which exchange messages through queues."""

import queue
import threading

import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.pipeline.executor.executor import Executor, RankStages
from ballast_trainer.pipeline.executor.order import RankOrder
from ballast_trainer.profiling.meter import Meter

from tests.support.waiting import WAIT_SECONDS


def half_square(output, target):
    return ((getattr(output, "hidden", output) - target) ** 2).mean() / 2


RATE = 0.1


class Threads:
    """Messages between threads, by (from, to, tag)."""

    def __init__(self):
        self.boxes = {}
        self.lock = threading.Lock()

    def box(self, *key):
        with self.lock:
            return self.boxes.setdefault(key, queue.Queue())

    def at(self, rank):
        threads = self

        class At:
            def send(self, tensor, message, tag):
                assert message.source == rank
                threads.box(rank, message.target, tag).put(tensor.clone())
                return Done()

            def receive(self, into, message, tag):
                assert message.target == rank
                return Coming(into, threads.box(message.source, rank, tag))

        return At()


class Done:
    def wait(self):
        pass


class Coming:
    def __init__(self, into, box):
        self.into, self.box = into, box

    def wait(self):
        self.into.copy_(self.box.get(timeout=WAIT_SECONDS))


def run(
    schedule,
    modules_by_rank,
    *,
    steps,
    batch,
    boundary,
    apply_gradients=None,
    loss=half_square,
    told_after=None,
):
    """Carry the schedule out; returns (loss by step, what was counted by rank).

    After its step ``told_after`` every rank is told to end as soon as all of them can.
    """
    transport, outcomes = Threads(), {}
    config = TrainingConfig(optimizer="torch.optim:SGD", learning_rate=RATE)

    def rank_main(rank):
        meter = Meter(schedule.stages, torch.device("cpu"), None)
        stacks = {
            stage: LayerStack([Layer(stage, module, config)], meter, 0, torch.device("cpu"))
            for stage, module in modules_by_rank[rank].items()
        }

        def update(stage, *, step, microbatches):
            apply_gradients(rank, stage, step=step, microbatches=microbatches)

        executor = Executor(
            RankStages(
                stacks=stacks,
                boundaries=(boundary,) * (schedule.stages - 1),
                meter=meter,
                loss=loss,
                device=torch.device("cpu"),
            ),
            transport=transport.at(rank),
            batch=batch,
            apply_gradients=update,
        )
        try:
            order = RankOrder(schedule, rank, steps)
            executor.begin(order, 0)
            losses = []
            while not executor.ended:
                losses.append(executor.advance())
                if len(losses) - 1 == told_after:
                    executor.end_after(told_after + order.lead)
            outcomes[rank] = losses, executor.finish()
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    assert sorted(outcomes) == list(range(schedule.ranks))
    losses = [
        sum(part for part in parts if part is not None)
        for parts in zip(*(outcomes[rank][0] for rank in range(schedule.ranks)), strict=True)
    ]
    return losses, [outcomes[rank][1] for rank in range(schedule.ranks)]
