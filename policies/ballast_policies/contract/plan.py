"""The plan: what the operator wants a job's ranks to be and to do, and how one plan follows another.

A plan has an epoch; a larger epoch replaces a smaller one.  ``stages`` assigns layers to stages
and stages to ranks; an empty ``stages`` leaves the partition to the trainer, which knows its
layers' cost.  While it runs, the trainer may move layers between the plan's ranks on its own
(that is rebalancing, reported and not asked for); only a new epoch changes the ranks.
"""

import enum
from collections.abc import Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ballast_policies.contract.limits import (
    LONGEST_NAME,
    LONGEST_REASON,
    MOST_CANDIDATES,
    MOST_EPOCH,
    MOST_RANKS,
    OBJECT,
    Limits,
)
from ballast_policies.contract.messages import Candidate, Proposal, Rank, Stage, Stages
from ballast_policies.contract.model import Model


class Directive(enum.StrEnum):
    """Instruction to the ranks on reaching the plan's epoch."""

    RUN = "run"
    """Train with these ranks: a launch."""
    CHECKPOINT_AND_STOP = "checkpointAndStop"
    """Save the state and exit with ``ExitCode.STOPPED``; the job continues later, maybe elsewhere."""
    SHRINK = "shrink"
    """The plan's ranks are a subset of the last epoch's: move layers onto them, the others leave."""
    GROW = "grow"
    """The plan's ranks are a superset of the last epoch's: the new ones join, layers move onto them."""


class Plan(Model):
    """``plan.json``: the ranks of a job, its stages, and what to do.

    Attributes:
        job: name of the TrainingJob.
        epoch: version of the plan, from 1, growing for the life of the job (restarts included).
        launch: which launch of the job these pods belong to, from 1.
        directive: what to do on reaching the epoch.
        ranks: by rank, without gaps; those of a pod follow each other, in the order of its local ranks.
        stages: by layer, without gaps; empty leaves the partition to the trainer.
        reason: why the plan is as it is, for logs.
        deadline: by when it has to be reached, seconds since 1970: then a node of the gang goes; None: there
            is no such time.
        failures_per_hour: how often machines of the gang are expected to be lost; None: not known. It may
            change within an epoch.
        candidates: to be trained by for a few steps each, the first being in force; the fastest goes on.
            Fewer than two: nothing is tried.

    Raises:
        ValueError: ranks or stages have gaps, or a stage names a rank that is not in the plan.
    """

    LIMITS: ClassVar[Limits] = OBJECT

    job: str = Field(max_length=LONGEST_NAME)
    epoch: int = Field(ge=1, le=MOST_EPOCH)
    launch: int = Field(ge=1, le=MOST_EPOCH)
    directive: Directive
    ranks: tuple[Rank, ...] = Field(max_length=MOST_RANKS)
    stages: Stages = ()
    reason: str = Field("", max_length=LONGEST_REASON)
    deadline: float | None = Field(None, ge=0, le=1e12)
    failures_per_hour: float | None = Field(None, ge=0, le=1e9)
    candidates: tuple[Candidate, ...] = Field((), max_length=MOST_CANDIDATES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [r.rank for r in self.ranks] != list(range(len(self.ranks))) or not self.ranks:
            raise ValueError(f"ranks must be 0..n-1 in order, got {[r.rank for r in self.ranks]}")
        self._check_pods()
        next_layer = 0
        for stage in self.stages:
            if stage.first_layer != next_layer:
                raise ValueError(
                    f"stage on rank {stage.rank} starts at layer {stage.first_layer}, expected {next_layer}: "
                    "stages cover the layers in order, without gaps"
                )
            if stage.rank >= len(self.ranks):
                raise ValueError(f"a stage is on rank {stage.rank}, but the plan has {len(self.ranks)} ranks")
            next_layer = stage.end_layer
        return self

    def _check_pods(self) -> None:
        """Raise where a pod's ranks do not follow each other as its local ranks 0, 1, ..."""
        before: Rank | None = None
        ended: set[str] = set()
        for rank in self.ranks:
            follows = before is not None and rank.pod == before.pod
            expected = before.local_rank + 1 if before is not None and follows else 0
            if rank.pod in ended or rank.local_rank != expected:
                raise ValueError(
                    f"rank {rank.rank} is local rank {rank.local_rank} of pod {rank.pod!r}: ranks of a pod "
                    "follow each other, as its local ranks 0, 1, ..., each once"
                )
            if before is not None and not follows:
                ended.add(before.pod)
            before = rank

    @property
    def pods(self) -> tuple[str, ...]:
        """The pods, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.pod for rank in self.ranks))

    def rank_of(self, process: str) -> int | None:
        """The rank of a process in this plan, or None where it is not part of it.

        ``process``: its name. A pod's name is that of its first process, so it gives the pod's first rank.
        """
        return next((r.rank for r in self.ranks if r.process == process), None)

    def shrink(self, proposal: Proposal) -> "Plan":
        """The next epoch, on the proposal's kept pods, in its order and with its stages.

        Raises:
            ValueError: the proposal was made in another epoch or names a pod that is not in the plan, or its
                stages have gaps.
        """
        if proposal.epoch != self.epoch:
            raise ValueError(f"the proposal is of epoch {proposal.epoch}, the plan of epoch {self.epoch}")
        unknown = sorted({*proposal.kept_pods, *proposal.released_pods} - set(self.pods))
        if unknown:
            raise ValueError(f"the proposal names {unknown}, the plan's pods are {sorted(self.pods)}")
        return self._shrunk(proposal.kept_pods, proposal.stages, proposal.reason, None)

    def keep(self, pods: Sequence[str], reason: str, deadline: float | None = None) -> "Plan":
        """The next epoch, on these pods only, in this order; the trainer chooses the stages.

        Args:
            pods: of this plan's, first that with the lowest ranks: rank 0 changes only where its pod is lost.
            reason: why, for logs.
            deadline: when a node of the others goes, seconds since 1970.

        Raises:
            ValueError: a pod is not in the plan, all of them are kept, or a later one is to be the first.
        """
        first = next((pod for pod in self.pods if pod in pods), None)
        if first is None or pods[0] != first or not len(set(pods)) == len(pods) < len(self.pods):
            raise ValueError(f"{list(pods)} are not some of {list(self.pods)}, the lowest ranks first")
        unknown = sorted(set(pods) - set(self.pods))
        if unknown:
            raise ValueError(f"{unknown} are to stay, the plan's pods are {list(self.pods)}")
        return self._shrunk(pods, (), reason, deadline)

    def _shrunk(
        self, pods: Sequence[str], stages: tuple[Stage, ...], reason: str, deadline: float | None
    ) -> "Plan":
        kept = [rank for pod in pods for rank in self.ranks if rank.pod == pod]
        return self.replace(
            epoch=self.epoch + 1,
            directive=Directive.SHRINK,
            ranks=tuple(rank.replace(rank=number) for number, rank in enumerate(kept)),
            stages=stages,
            reason=reason,
            deadline=deadline,
            candidates=(),
        )

    def grow(self, new: Sequence[Rank], reason: str) -> "Plan":
        """The next epoch, with ``new`` behind the ranks of this one; the trainer chooses the stages.

        ``new``: the ranks that join, numbered on from this plan's; ``reason``: for logs.

        Raises:
            ValueError: there are none, or their numbers or pods do not follow this plan's.
        """
        if not new:
            raise ValueError("a growth needs at least one new rank")
        return self.replace(
            epoch=self.epoch + 1,
            directive=Directive.GROW,
            ranks=(*self.ranks, *new),
            stages=(),
            reason=reason,
            deadline=None,
            candidates=(),
        )

    def stop(self, reason: str, deadline: float | None = None) -> "Plan":
        """The next epoch: the same ranks save a checkpoint, by ``deadline`` if there is one, and exit."""
        return self.replace(
            epoch=self.epoch + 1,
            directive=Directive.CHECKPOINT_AND_STOP,
            reason=reason,
            deadline=deadline,
        )
