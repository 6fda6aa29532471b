"""A registry: name -> row, ours first, then those of installed distributions (entry points).

Ballast's own names have no dot, those of its laboratory ``ballast-lab`` among them. Another distribution
registers a row under a name with a prefix of its own, in one of the groups ``ballast.policies``,
``ballast.elastic_policies``, ``ballast.schedules``, ``ballast.balancers``, ``ballast.planners`` and
``ballast.dynamics``::

    [project.entry-points."ballast.policies"]
    "acme.longest-first" = "acme_policies.longest_first:POLICY"

Its module is imported when the row is first asked for, never before.
"""

import difflib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Row = TypeVar("Row")

PREFIXED = r"[A-Za-z][-A-Za-z0-9_]*(\.[A-Za-z0-9][-A-Za-z0-9_]*)+"
"""Names that distributions may register: a prefix of their own, a dot, a name."""

LABORATORY = "ballast-lab"
"""Ballast's own distribution for other people's results: its names need no prefix."""


class RegistryError(ValueError):
    """A name cannot be used; the text names the distribution where one is at fault, and what to change."""


class UnknownNameError(RegistryError):
    """Neither Ballast nor an installed distribution registers the name."""


class BrokenEntryError(RegistryError):
    """A distribution registers the name, but its row cannot be loaded."""


class Registry(Mapping[str, Row], Generic[Row]):
    """Rows by name; a mapping over all usable names that imports nothing until a row is asked for.

    Attributes:
        what: what a row is, for messages, e.g. ``policy``.
        group: entry point group of other distributions.
        builtin: Ballast's own rows. Generated files depend on these alone.
    """

    def __init__(self, what: str, *, group: str, row_type: type[Row], rows: Mapping[str, Row]) -> None:
        self.what = what
        self.group = group
        self.builtin: dict[str, Row] = dict(rows)
        self._row_type = row_type
        self._loaded: dict[str, Row | BrokenEntryError] = {}

    def __getitem__(self, name: str) -> Row:
        """The row.

        Raises:
            KeyError: the name is not registered.
            BrokenEntryError: it is, by a distribution whose row cannot be loaded.
        """
        if name in self.builtin:
            return self.builtin[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(self._registered[0][name])
        loaded = self._loaded[name]
        if isinstance(loaded, BrokenEntryError):
            raise loaded
        return loaded

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._registered[0]

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from self._registered[0]

    def __len__(self) -> int:
        return len(self.builtin) + len(self._registered[0])

    def find(self, name: str, error: type[ValueError] | None = None) -> Row:
        """The row of ``name``.

        Args:
            name: from a user, so possibly wrong.
            error: raised in place of the errors below, with what a row is before the text.

        Raises:
            UnknownNameError: the text lists the known names.
            BrokenEntryError: a distribution registers it, and its row cannot be loaded.
        """
        try:
            if name in self:
                return self[name]
            raise UnknownNameError(self.why_unknown(name))
        except RegistryError as reason:
            if error is None:
                raise
            raise error(f"{self.what}: {reason}") from reason

    def own(self, holds: Callable[[Row], bool] = lambda row: True) -> tuple[str, ...]:
        """Ballast's own names whose rows have a property, e.g. ``own(lambda kind: kind.asynchronous)``."""
        return tuple(name for name, row in self.builtin.items() if holds(row))

    def why_unknown(self, name: str) -> str:
        """Reason that ``name`` cannot be used, as text: refused, or not registered at all."""
        if name in self.refused:
            return self.refused[name]
        known = {other.lower(): other for other in self}
        near = [known[other] for other in difflib.get_close_matches(name.lower(), known, n=1)]
        return f"{name!r} is not one of {', '.join(self)}" + (f"; did you mean {near[0]!r}?" if near else "")

    @property
    def refused(self) -> Mapping[str, str]:
        """Names that distributions registered and that are not used -> why, and what to change."""
        return self._registered[1]

    def rescan(self) -> None:
        """Forget what other distributions register: the next use looks again."""
        self.__dict__.pop("_registered", None)
        self._loaded.clear()

    @functools.cached_property
    def _registered(
        self,
    ) -> tuple[dict[str, importlib.metadata.EntryPoint], dict[str, str]]:
        """(usable entry points by name, reasons of the refused ones); nothing is imported."""
        by_name: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
        for entry in importlib.metadata.entry_points(group=self.group):
            # A distribution that is found twice on the path (an editable install) says the same twice.
            by_name.setdefault(entry.name, {})[f"{_distribution(entry)}: {entry.value}"] = entry
        usable, refused = {}, {}
        for name, entries in sorted(by_name.items()):
            distributions = sorted({_distribution(entry) for entry in entries.values()})
            ours = {entry.dist.name if entry.dist else "" for entry in entries.values()} == {LABORATORY}
            if not ours and not re.fullmatch(PREFIXED, name):
                refused[name] = (
                    f"{self.what} {name!r} of {', '.join(distributions)} is not used: names without a prefix "
                    f"are Ballast's own. To fix: register it with a prefix, e.g. acme.{name or 'name'}"
                )
            elif len(entries) > 1:
                refused[name] = (
                    f"{self.what} {name!r} is registered {len(entries)} times ("
                    f"{', '.join(distributions)}): "
                    "none is used. To fix: uninstall all but one, or let one use another name"
                )
            else:
                (usable[name],) = entries.values()
        return usable, refused

    def _load(self, entry: importlib.metadata.EntryPoint) -> Row | BrokenEntryError:
        where = f"{self.what} {entry.name!r} of {_distribution(entry)} ({entry.value})"
        try:
            row = entry.load()
        except (Exception, SystemExit) as error:  # any code may run here; it does not end the program
            return BrokenEntryError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}. "
                "To fix: repair or uninstall that distribution"
            )
        if not isinstance(row, self._row_type):
            return BrokenEntryError(
                f"{where} is of type {type(row).__name__}, not {self._row_type.__name__}. "
                f"To fix: let the entry point name a {self._row_type.__module__}.{self._row_type.__name__}"
            )
        return row


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    if entry.dist is None:
        return "an unnamed distribution"
    return f"{entry.dist.name} {entry.dist.version}"
