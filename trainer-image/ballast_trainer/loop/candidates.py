"""Candidates of a plan: trained by for a few steps each, one after the other; the measured fastest goes on.

It is AMP's last step (supplement, algorithm 2) with steps that count: from one candidate to the next only
layers move, and the order of the microbatches and the forwards that are repeated change, none of which the
loss depends on. It does on the number of microbatches, in whose order gradients are summed.
"""

import itertools
import logging
import math
import statistics

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import LONGEST_REASON
from ballast_policies.contract.messages import Candidate, Tried
from ballast_policies.planning.launch import stages_over
from ballast_policies.planning.partition import Partition

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.loop.migrate import MigrationFailed
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.reshape import move_layers

logger = logging.getLogger(__name__)

_WARM = 2
"""Steps of a candidate before those that count: buffers, connections and caches are made in them."""

_MEASURED = 3
"""Steps of a candidate whose median counts."""


class Candidates:
    """The candidates of the plan in force; collective: every rank calls it after the same steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._epoch = progress, 0
        self._candidates: tuple[Candidate, ...] = ()
        self._tried: list[Tried] = []
        self._steps = 0

    @property
    def under_way(self) -> bool:
        """True if they are being tried: then layers move for nothing else."""
        return len(self._tried) < len(self._candidates)

    @property
    def _results(self) -> tuple[Tried, ...]:
        return (*self._tried, *(Tried(),) * (len(self._candidates) - len(self._tried)))

    def begin(self) -> None:
        """Try those of the plan in force, if it is new and has any."""
        plan, world = self._progress.run.plan, self._progress.model.world
        if plan.epoch == self._epoch:
            return
        self._epoch, self._tried, self._steps = plan.epoch, [], 0
        several = len(plan.candidates) > 1 and world.positions > 1
        self._candidates = plan.candidates if several else ()
        # The first is in force, unless ranks go on in place by another.
        self._take_next()
        self._progress.tried(self._results, None)

    def step_done(self) -> None:
        """Count a step; after the last of a candidate take the next, after all of them the fastest."""
        self.begin()
        if not self.under_way:
            return
        self._steps += 1
        if self._steps < _WARM + _MEASURED:
            return
        progress = self._progress
        seconds = statistics.median(progress.step_seconds()[-_MEASURED:])
        self._tried.append(Tried(step_seconds=progress.model.world.from_rank_0(seconds)))
        self._steps = 0
        self._take_next()
        kept = None
        if not self.under_way:
            took = [math.inf if one.step_seconds is None else one.step_seconds for one in self._tried]
            # One that has run may yet find no room: then the next.
            kept = next((n for n in sorted(range(len(took)), key=took.__getitem__) if not self._take(n)), 0)
            self._tell(kept)
        progress.tried(self._results, kept)

    def _take_next(self) -> None:
        """Train on by the next one that can be, if any."""
        while self.under_way and (reason := self._take(len(self._tried))):
            self._tried.append(Tried(reason=reason[:LONGEST_REASON]))

    def _take(self, number: int) -> str:
        """Train on by a candidate. Returns why it cannot be, all being as it was; empty: it is."""
        model, candidate, before = self._progress.model, self._candidates[number], self._progress.model.config
        try:
            training = before.training
            if candidate.repeated is not None:
                training = training.replace(
                    recompute=candidate.repeated > 0, recompute_every=max(1, candidate.repeated)
                )
            # Its own plan has said how it was launched.
            model.config = before.replace(
                pipeline=before.pipeline.replace(schedule=candidate.schedule), training=training, plan=None
            )
            model.layers.config = training
            placement, layers = model.placement(model.world.size), model.definition.layer_count
            bounds = tuple(itertools.accumulate(candidate.layers, initial=0))
            if (len(bounds), bounds[-1]) != (1 + len(placement), layers):
                reason = f"{len(bounds) - 1} stages of {bounds[-1]} layers"
                raise ConfigurationError(
                    "plan.candidates", f"{reason}, not {len(placement)} of {layers}. To fix: another plan"
                )
            stages = stages_over(Partition(bounds=bounds), placement)
            runs_anew = (candidate.schedule, training) != (before.pipeline.schedule, before.training)
            if runs_anew:
                # Whether backwards can be split, or forwards repeated, is not seen by cuts that have run
                # without.
                model.partition_cache.forget()
            if runs_anew or stages != model.stages:
                self._progress.migrated(move_layers(model, self._progress.run, stages))
        except (MigrationFailed, ConfigurationError, ContractError) as error:
            model.config, model.layers.config = before, before.training
            return str(error) or type(error).__name__
        model.profile.forget()
        self._progress.reshaped()
        return ""

    def _tell(self, kept: int) -> None:
        rows = [
            {
                "schedule": candidate.schedule,
                "layers": candidate.layers,
                "repeated": candidate.repeated,
                "predicted_seconds": candidate.step_seconds,
                "measured_seconds": tried.step_seconds,
                "reason": tried.reason,
            }
            for candidate, tried in zip(self._candidates, self._tried, strict=True)
        ]
        self._progress.event("tried", candidates=rows, kept=kept)
        if self._progress.model.world.rank != 0:
            return
        for number, row in enumerate(rows):
            logger.info(
                "%s of layers %s: %s s a step, predicted %.3g%s%s",
                row["schedule"],
                row["layers"],
                "no" if row["measured_seconds"] is None else f"{row['measured_seconds']:.3g}",
                row["predicted_seconds"],
                ", goes on" if number == kept else "",
                f": {row['reason']}" if row["reason"] else "",
            )
