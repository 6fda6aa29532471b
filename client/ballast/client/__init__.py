"""Training jobs of a cluster from Python: submit, wait, watch, logs, cost, suspend, resume, delete, list.

    from ballast.client import Client, training_job

    with Client() as ballast:
        command = ["python", "train.py"]
        ballast.submit(training_job("mine", image="mine:1", command=command, steps=1000, gpus=2))
        for line in ballast.logs("mine", follow=True):
            print(line.rank, line.text)
        print(ballast.wait("mine").cost.so_far)

:class:`AsyncClient` has the same methods for programs with an event loop. It needs
``pip install 'ballast-client[cluster]'``. The library for the script itself is :mod:`ballast_client`.
"""

from ballast.client.aio import AsyncClient
from ballast.client.errors import (
    AlreadyExists,
    BallastError,
    Forbidden,
    JobFailed,
    LoggedOut,
    NotConnected,
    NotFound,
    Refused,
    WaitedTooLong,
)
from ballast.client.job import Cost, Job, Jobs, training_job
from ballast.client.logs import LogLine
from ballast.client.sync import Client

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "BallastError",
    "Client",
    "Cost",
    "Forbidden",
    "Job",
    "JobFailed",
    "Jobs",
    "LogLine",
    "LoggedOut",
    "NotConnected",
    "NotFound",
    "Refused",
    "WaitedTooLong",
    "training_job",
]
