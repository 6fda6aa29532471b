"""Carries out schedules action by action: replicas of a stage, and schedules without a flush.

``executor`` does one rank's actions, with the stage's work in ``stage_work``, its weight versions in
``versions``, its messages in ``links`` and their shapes in ``boundaries``; ``order`` is a rank's part of a
schedule.  ``replicated`` and ``flowing`` make pipelines of it, ``flow`` trains with one that never flushes.
"""
