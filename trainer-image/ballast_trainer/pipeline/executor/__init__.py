"""Executor of schedules, action by action, for replicas of a stage and schedules without a flush.

``executor`` runs one rank's actions, with backwards split in ``split_backward`` and messages in ``links``;
``order`` is a rank's part of a schedule.  ``pipelines`` builds pipelines of it; ``loop.step`` trains without
a flush.
"""
