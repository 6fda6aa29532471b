"""A move runs only what no trial of an earlier partition has run; all ranks decide alike."""

import collections

import pytest
import torch
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.pipeline.stages import PipelineBuilder
from ballast_trainer.pipeline.trial import Findings, PartitionCache, TrialFailed
from ballast_trainer.profiling.meter import Meter

from tests.support import replans
from tests.trainer.layers.trained_layers import all_layers
from tests.trainer.tensor_parallel.ranks import on_ranks

LAYERS = 6
BEFORE, AFTER = (0, 2, 4, 6), (0, 2, 5, 6)


def stages_at(bounds, ranks=range(3)):
    return replans.stages_at(bounds, ranks[: len(bounds) - 1])


class Job:
    """A model all of whose layers are in this process, for trials as any rank of it."""

    def __init__(self):
        self.model = build_gpt(layers=LAYERS, dim=8, heads=2, context=4)
        self.layers = all_layers(self.model)
        self.known = PartitionCache()
        self.forwards = collections.Counter()
        for layer in self.layers:
            layer.module.register_forward_hook(lambda *_, index=layer.index: self.forwards.update([index]))

    def probe_partition(
        self, bounds, *, gather=lambda value: [value], in_force=None, joined=(), rank=0, **fields
    ):
        """The boundaries, and the layers that ran; ``fields`` of the pipeline."""
        self.forwards.clear()
        stages = stages_at(bounds)
        builder = PipelineBuilder(
            stages=stages,
            schedule=ScheduleRequest(name="1F1B", ranks=len(stages), microbatches=4),
            rank=rank,
            layers=self.layers,
            meter=Meter(LAYERS, torch.device("cpu"), None),
            loss=self.model.loss,
            **fields,
        )
        boundaries = builder.probe_partition(
            self.model.batch(0, 0, 4),
            gather,
            known=self.known,
            in_force=in_force and stages_at(in_force),
            joined=joined,
        )
        return boundaries, sorted(self.forwards.elements())

    def learn(self, *cuts):
        """A trial of the whole model finds all outputs; partitions at ``cuts`` are said to have run."""
        self.probe_partition((0, LAYERS))
        for bounds in cuts:
            self.known.add(stages_at(bounds), [])


EVEN = (0, 2, 4, 6)
TRIALS = {
    "a new stage": ((BEFORE,), AFTER, {"in_force": BEFORE}, [[], [2, 3, 4], [5]]),
    "every cut has run": ((EVEN, (0, 1, 5, 6)), (0, 2, 5, 6), {"in_force": EVEN}, [[], [], []]),
    "independent layers": ((BEFORE,), AFTER, {"in_force": BEFORE, "independent_layers": True}, [[], [], []]),
    "ranks that join": ((EVEN,), EVEN, {"in_force": (0, 2, 6), "joined": {1, 2}}, [[], [2, 3], [4, 5]]),
    "independent layers of ranks that join": (
        (EVEN,),
        EVEN,
        {"in_force": (0, 2, 6), "joined": {1, 2}, "independent_layers": True},
        [[], [2, 3], [4, 5]],
    ),
    "fewer ranks": ((EVEN,), (0, 4, 6), {"in_force": EVEN}, [[]]),
}


@pytest.mark.parametrize(("known", "tried", "how", "runs"), TRIALS.values(), ids=TRIALS)
def test_what_has_run_does_not_run_again(known, tried, how, runs):
    """By rank, the layers that run, between boundaries that are known: no rank waits for another's forward.

    Where every cut has run, each has separated all layers before it from all behind it.
    """
    for rank, ran in enumerate(runs):
        job = Job()
        job.learn(*known)
        gradients = [parameter.grad for parameter in job.layers.parameters()]
        boundaries, forwards = job.probe_partition(tried, rank=rank, **how)
        assert forwards == ran
        assert [one.tensors[0].shape for one in boundaries] == [(1, 4, 8)] * (len(tried) - 2)
        assert [parameter.grad for parameter in job.layers.parameters()] == gradients


def test_a_new_stage_that_cannot_run_is_refused():
    """As by a trial of all stages: the cause is named, and nothing is recorded."""
    job = Job()
    job.learn(BEFORE)

    def refuse(*_):
        raise LookupError("layer 0 is not in this process")

    handle = job.layers[4].module.register_forward_pre_hook(refuse)
    with pytest.raises(TrialFailed, match="layer 0 is not in this process"):
        job.probe_partition(AFTER, rank=1, in_force=BEFORE)
    assert not job.known.all_ran(stages_at(AFTER))
    handle.remove()
    job.probe_partition(AFTER, rank=1, in_force=BEFORE)
    assert job.known.all_ran(stages_at(AFTER))


def test_a_stage_that_sends_something_else_than_before_is_refused():
    """Its neighbour has made room for what was known."""
    job = Job()
    job.learn(BEFORE)
    job.layers[4].module.register_forward_hook(lambda module, given, output: output.double())
    with pytest.raises(TrialFailed, match="stage 1 sends"):
        job.probe_partition(AFTER, rank=1, in_force=BEFORE)


def test_a_refusal_of_another_rank_reaches_this_one():
    """Whose own stage ran well, or did not run at all."""
    job = Job()
    job.learn(BEFORE)
    refused = ("no memory", Findings({}, {}))
    with pytest.raises(TrialFailed, match="rank 1: no memory"):
        job.probe_partition(AFTER, gather=lambda value: [value, refused], in_force=BEFORE)


def trials_that_fail_on_rank_3(world, known):
    """Forwards of layer 2 meet over both axes, and so do backwards; the causes that this rank is told."""
    job, told = Job(), []
    job.learn((0, LAYERS))

    def meet(*given):
        for axis in (world.tensor, world.data):
            axis.all_reduce(torch.ones(1))

    def fail(*given):
        if world.rank == 3:
            raise MemoryError("no room")

    layer = job.layers[2].module
    layer.register_forward_hook(meet)
    layer.register_full_backward_hook(meet)
    for register in (layer.register_forward_pre_hook, layer.register_full_backward_pre_hook, None):
        handle = register(fail) if register else None
        how = {"in_force": BEFORE, "joined": {0}} if known else {}
        shared = (world.tensor, world.data)
        try:
            job.probe_partition((0, LAYERS), gather=world.gather, line=world.pipeline, shared=shared, **how)
            told.append("")
        except TrialFailed as error:
            told.append(str(error))
        if handle is not None:
            handle.remove()
    return told


@pytest.mark.processes
@pytest.mark.parametrize("known", [True, False])
def test_ranks_that_wait_inside_a_stage_for_one_that_fails_fail_with_it(known):
    """Those that share no axis with it, too, in a forward and in a backward; then all can go on."""
    for first, second, third in on_ranks(trials_that_fail_on_rank_3, 4, known, mesh=Mesh(tensor=2, data=2)):
        assert first.startswith("rank 3: MemoryError: no room")
        assert second.startswith("rank 3: MemoryError: no room")
        assert third == ""


def test_cuts_between_stages_of_one_rank_separate_nothing():
    """Both stages were in one process: as stages of two ranks they are tried."""
    known = PartitionCache()
    known.add(stages_at((0, 2, 4, 6), ranks=(0, 1, 0)), [])
    assert not known.all_ran(stages_at((0, 2, 4, 6)))
    known.add(stages_at((0, 2, 4, 6)), [])
    assert known.all_ran(stages_at((0, 2, 4, 6)))
    assert not known.all_ran(stages_at((0, 2, 4, 6), ranks=(0, 1, 0)))


def test_what_is_forgotten_is_tried_again():
    """Layers that changed may send something else."""
    known = PartitionCache()
    sent = Boundary.of(torch.ones(1, 4, 8, requires_grad=True))
    known.add(stages_at(BEFORE), [Findings({1: sent}, {}), Findings({3: sent}, {})])
    assert known.boundaries(stages_at(BEFORE)) == (sent, sent)
    assert known.boundaries(stages_at(AFTER)) is None
    known.forget()
    assert known.boundaries(stages_at(BEFORE)) is None
    assert not known.all_ran(stages_at(BEFORE))


def test_modules_with_state_are_known_on_the_rank_that_receives_them():
    """Recomputation and replicas need to know them; the receiver need not run the layer for it."""
    known, layers = PartitionCache(), Job().layers
    module = layers[2].module
    name = next(name for name, _ in module.named_modules() if name)
    known.add(stages_at(BEFORE), [Findings({}, {2: (f"{name}.seen",)}), Findings({}, {})])
    known.mark(layers)
    assert [layer.stateful for layer in layers] == [
        (module.get_submodule(name),) if layer.index == 2 else () for layer in layers
    ]
