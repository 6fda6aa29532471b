"""A user's function as a row of the table of policies, registered or named as ``module:function``."""

import functools
import importlib
import re
from collections.abc import Iterable

import numpy as np

from ballast_policies.allocation.answer import Answer
from ballast_policies.allocation.custom.solve import Function, objective, solve
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Policy, Reads, SpaceSharing
from ballast_policies.allocation.problem import ProblemError

CALLABLE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""``module:function``; it is imported on its first allocation."""

MAY_READ = (Reads.PRICES, Reads.STEPS, Reads.ARRIVAL_ORDER, Reads.ELAPSED, Reads.DEADLINES)
"""Inputs that a function may read unless it declares its own."""


def own_policy(
    function: Function,
    *,
    name: str = "",
    summary: str = "",
    reads: Iterable[Reads] = MAY_READ,
    compares_speeds: bool = True,
) -> Policy:
    """The row of a function, for an entry point of the group ``ballast.policies``.

    Args:
        function: see :data:`~ballast_policies.allocation.custom.solve.Function`.
        name: for messages; the function's own, if left out.
        summary: the problem that it solves, for the documentation.
        reads: inputs that it reads beyond throughputs, gangs and weights. Where a job lacks one, a
            condition names the default in use; a change of one of them causes a new allocation.
        compares_speeds: it weighs steps per second of one job against those of another.
    """
    called = name or getattr(function, "__name__", "policy")
    return Policy(
        summary=summary or (function.__doc__ or called).strip().splitlines()[0],
        solve=functools.partial(_solve, called, function),
        objective=functools.partial(objective, function),
        reads=frozenset(reads),
        compares_speeds=compares_speeds,
        space_sharing=SpaceSharing.NEVER,
        proves_gap=False,
    )


def named_policy(name: str) -> Policy:
    """The row of ``module:function``; the module is imported on its first allocation.

    Raises:
        ProblemError: the name is no module and function.
    """
    if not re.fullmatch(CALLABLE, name):
        raise ProblemError(f"policy: {name!r} is not module:function. To fix: e.g. my_policies:longest_first")
    return Policy(
        summary=f"the function {name}",
        solve=functools.partial(_import_and_solve, name),
        objective=functools.partial(_import_and_evaluate, name),
        reads=frozenset(MAY_READ),
        compares_speeds=True,
        space_sharing=SpaceSharing.NEVER,
        proves_gap=False,
    )


def _solve(name: str, function: Function, instance: Instance) -> Answer:
    try:
        return solve(function, instance)
    except ModuleNotFoundError as error:
        raise ProblemError(
            f"policy {name}: it needs the Python package {error.name!r}. "
            "To fix: pip install 'ballast-operator[policies]'"
        ) from error
    except ProblemError as error:
        raise ProblemError(f"policy {name}: {error}") from error


def _import_and_solve(name: str, instance: Instance) -> Answer:
    found = _imported(name)
    return found.solve(instance) if isinstance(found, Policy) else _solve(name, found, instance)


def _import_and_evaluate(name: str, instance: Instance, x: np.ndarray) -> float:
    found = _imported(name)
    return found.objective(instance, x) if isinstance(found, Policy) else objective(found, instance, x)


def _imported(name: str) -> Policy | Function:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # any code may run here
        raise ProblemError(
            f"policy {name} cannot be imported: {type(error).__name__}: {error}. "
            "To fix: name a function of a module that this installation has"
        ) from error
    if isinstance(found, Policy):
        return found
    if not callable(found):
        raise ProblemError(f"policy {name} is of type {type(found).__name__}, not a function")
    function: Function = found
    return function
