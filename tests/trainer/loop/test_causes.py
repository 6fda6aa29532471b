"""The cause of an end is what the user reads last: the layer's own error, not what was wrapped around it."""

import errno
import os
import re

import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage
from ballast_trainer.causes import describe, explains_itself
from ballast_trainer.distributed.process_group import peer_failures
from ballast_trainer.errors import ConfigurationError, PeerLost
from ballast_trainer.models.protocol import Model
from ballast_trainer.pipeline.trial import TrialFailed, checked_loss
from ballast_trainer.process_exit import end

from tests.support.examples import first_daily
from tests.support.jobs import small_job
from tests.support.one_process import train_here

pytestmark = pytest.mark.processes

MODEL = """
import os
import torch
import torch.distributed as dist
from torch import nn
from ballast_trainer.models.protocol import Model


class Narrow(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)


class Full(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, value):
        self.calls += 1
        if self.calls > 12:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return self.linear(value)


def build():
    layers = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 8), Full, lambda: nn.Linear(8, 1)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss)


def mismatched():
    layers = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 8), Narrow, lambda: nn.Linear(8, 1)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss)


class OnOneReplica(Full):
    def forward(self, value):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return self.linear(value)


def on_one_replica():
    layers = [lambda: nn.Linear(8, 8), OnOneReplica, lambda: nn.Linear(8, 1)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss)


def batches():
    def batch(seed, step, size):
        if step == 3:
            raise ConnectionError("the bucket timed out")
        return torch.randn(size, 8), torch.zeros(size, 1)
    return batch


def wider():
    def batch(seed, step, size):
        more = (3,) if step == 3 else ()
        return torch.randn(size, *more, 8), torch.zeros(size, *more, 1)
    return batch


def good_batches():
    return lambda seed, step, size: (torch.randn(size, 8), torch.zeros(size, 1))
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "users_failures.py").write_text(MODEL)

    def make(data, model="build"):
        return small_job(f"users_failures:{model}", data=f"users_failures:{data}", steps=20)

    return make


def test_out_of_memory_in_a_layer_is_the_last_line(gang, config, tmp_path):
    """With local ranks: after the lines of ranks that only lost the one that failed."""
    running = gang(config("good_batches"), ranks=2, folder=tmp_path, local=True)
    assert running.exit_code("run") == ExitCode.ERROR
    said = "OutOfMemoryError: tried to allocate 20.00 GiB (in layer 2, Full)"
    assert running.errors().strip().splitlines()[-1] == f"ballast-train: TrainingFailed: rank 1: {said}"
    assert running.errors().count(said) == 1


def test_a_trial_that_fails_on_one_replica_alone_ends_all(gang, config, tmp_path):
    """Whose weights the other one waits for, in the middle of its own trial."""
    sharded = {**config("good_batches", "on_one_replica"), "parallelism": {"data": 2, "zeroStage": 3}}
    running = gang(sharded, ranks=2, folder=tmp_path)
    assert running.exit_codes() == {"rank-0": ExitCode.ERROR, "rank-1": ExitCode.ERROR}
    assert (
        "rank 1: OutOfMemoryError: tried to allocate 20.00 GiB (in layer 1, OnOneReplica)" in running.errors()
    )


@pytest.mark.parametrize("ranks", first_daily([2, 1]))
def test_a_layer_that_cannot_take_what_it_receives_is_told_with_what_that_is(gang, config, tmp_path, ranks):
    """Any layer: its index and class, the shape that came, and what to change."""
    running = gang(config("good_batches", "mismatched"), ranks=ranks, folder=tmp_path)
    assert ExitCode.ERROR in running.exit_codes().values()
    assert re.search(
        r"RuntimeError: .*mat1 .* \(in layer 2, Narrow, received float32 \[2, 8\] from .*\)\. To fix: ",
        running.errors(),
    )


def test_a_data_set_whose_connection_fails_is_no_lost_rank(gang, config, tmp_path):
    """Its own error ends the job as failed, rather than as healthy ranks that a restart would help."""
    running = gang(config("batches"), ranks=1, folder=tmp_path)
    assert running.exit_codes() == {"rank-0": ExitCode.ERROR}
    assert re.search(
        r"TrainingFailed: data.name: 'users_failures:batches' does not give the batch of step 4: "
        r"ConnectionError: the bucket timed out \(users_failures.py, line \d+\). To fix: ",
        running.errors(),
    )


def test_a_batch_of_another_shape_than_the_first_is_told_by_the_rank_that_would_send_it(
    gang, config, tmp_path
):
    """Without a flush the stage after it waits for a message of that size, and would abort its process."""
    wider = config("wider")
    wider["pipeline"]["schedule"] = "PipeDream"
    running = gang({**wider, "training": {"clipNorm": None}}, ranks=2, folder=tmp_path)
    assert running.exit_codes() == {"rank-0": ExitCode.ERROR, "rank-1": ExitCode.PEER_LOST}
    assert re.search(
        r"layer 1 gives torch.float32 \[2, 3, 8\] in step 4, .* waits for torch.float32 \[2, 8\], .*To fix: ",
        running.errors(),
    )


def test_an_error_of_a_layer_keeps_what_it_came_from():
    """``raise ... from ...`` of the user's is not taken apart."""
    error = ValueError("no token 7")
    error.__cause__ = KeyError(7)
    assert describe(error) == "ValueError: no token 7, from KeyError: 7"


def test_a_layers_own_time_out_is_no_lost_rank():
    """Only the words of gloo and NCCL count in an error of a layer."""
    error = RuntimeError("the feature store timed out")
    error.add_note("in layer 3, Lookup")
    with pytest.raises(RuntimeError, match="feature store"), peer_failures():
        raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("gloo/transport/tcp/pair.cc: rv != -1. socket: Too many open files"), "ulimit -n"),
        (RuntimeError("[enforce fail at gloo/transport/x.cc:78] Cannot allocate memory"), "no more memory"),
        (dist.DistError("Resource temporarily unavailable"), "start no more threads"),
        (RuntimeError("can't start new thread"), "start no more threads"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "start no more threads"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found in (None, 'g++')"), "trainer-dev"),
    ],
)
def test_a_limit_of_this_ranks_own_is_no_lost_rank(error, told):
    """Else the ranks would start again and again, each naming another as the cause."""
    with pytest.raises(type(error)) as caught, peer_failures():
        raise error
    assert told in describe(caught.value) and "To fix" in describe(caught.value)
    assert explains_itself(caught.value)


def test_a_call_that_a_peer_has_not_answered_is_no_limit_of_this_rank():
    """NCCL passes on what the system said of the connection."""
    with pytest.raises(PeerLost), peer_failures():
        raise RuntimeError("NCCL error: call to connect failed: Resource temporarily unavailable")


def test_the_name_of_a_file_in_another_encoding_is_told(tmp_path):
    """Python has halves of characters in it, which no message of the contract may have."""
    log = tmp_path / "log"
    assert end(ExitReason.FAILED, "no file caf\udce9.pt", log=log) is ExitCode.ERROR
    assert TerminationMessage.from_json(log.read_text()).message == "no file caf?.pt"


@pytest.mark.parametrize("character", ["é", "😀", "\x1b"])
def test_a_long_message_can_be_read_where_kubernetes_cuts_it(tmp_path, character):
    """JSON escapes such a character by 6 or 12 bytes, and half a message has no reason."""
    log = tmp_path / "log"
    end(ExitReason.CONFIGURATION, "wrong: " + character * 3000, step=7, log=log)
    told = TerminationMessage.from_json(log.read_bytes()[:4096].decode())
    assert (told.reason, told.step) == (ExitReason.CONFIGURATION, 7)
    assert told.message.startswith("wrong: " + character * 300)


class Deterministic(torch.nn.Linear):
    """Has an operation without a deterministic kernel where ``scatters``."""

    scatters = False

    def forward(self, value):
        if self.scatters:
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))
        return super().forward(value) + float(not torch.are_deterministic_algorithms_enabled())


def of_deterministic(scatters):
    layers = [Deterministic(2, 2), Deterministic(2, 2)]
    layers[1].scatters = scatters
    return Model.from_layers(layers, loss=lambda output, targets: output.square().mean() - targets.mean())


def of_ones():
    return lambda seed, step, size: (torch.ones(size, 2), torch.zeros(size, 2))


def test_deterministic_training_uses_no_other_kernels_and_names_a_layer_that_needs_one():
    """The switch is off again afterwards; without it the same layer trains."""

    def train(deterministic, scatters):
        model = {"name": f"{__name__}:of_deterministic", "args": {"scatters": scatters}}
        given = {"data": f"{__name__}:of_ones", "training": {"deterministic": deterministic}}
        return train_here(small_job(model, microbatches=1, batch=2, **given)).losses

    assert train(True, False) != train(False, False) == train(False, True)
    with pytest.raises(Exception) as caught:
        train(True, True)
    assert re.search("deterministic implementation.*layer 1, Deterministic", describe(caught.value))
    assert not torch.are_deterministic_algorithms_enabled()


def _failed_by(cause):
    failed = TrialFailed("a stage cannot run")
    failed.__cause__ = cause
    return failed


def test_a_check_that_says_what_to_change_needs_no_traceback():
    """A model of which no weight learns; an error of the user's layer has one."""
    with pytest.raises(ConfigurationError, match=r"no weight that learns\. To fix: ") as caught:
        checked_loss(torch.zeros(()))
    assert explains_itself(_failed_by(caught.value))
    assert not explains_itself(_failed_by(RuntimeError("boom")))
