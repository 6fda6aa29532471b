"""The contract between the cluster loop (operator) and the job loop (trainer).

Operator to trainer: a :class:`Plan`, the ``plan.json`` of the ConfigMap ``<job>-plan``.
Trainer to operator: the Lease ``<job>``, which rank 0 renews, with a :class:`Report`,
a :class:`Proposal` and an :class:`Ack` in its annotations.  Without Kubernetes the same four
values are files in a directory.

All of them are frozen pydantic models with one JSON form; ``tests/contract/golden`` holds
the bytes that both sides are tested against.
"""
