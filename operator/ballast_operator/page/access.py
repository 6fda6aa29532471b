"""Access to the page, by what the API server lets a viewer see: nobody is let in without it.

A bearer token is reviewed (TokenReview); then for each namespace it is asked whether its user may get
TrainingJobs there (SubjectAccessReview). Answers are kept for a minute. Reviews of tokens that are not known
are limited, so that whoever guesses cannot have the API server asked at will.
"""

import asyncio
import dataclasses
import functools
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from ballast_operator.api import meta
from ballast_operator.kube.kinds import SUBJECT_ACCESS_REVIEW, TOKEN_REVIEW, Kind, Object

KEPT_SECONDS, REFUSED_SECONDS = 60.0, 10.0
"""Seconds for which an answer counts, and a refusal of a token."""

RENEWED_SECONDS = 20.0
"""Seconds before an answer's end in which a look has it asked for again: who keeps looking never waits."""

SESSION_SECONDS, MOST_SESSIONS = 8 * 3600.0, 1000
MOST_TOKENS, MOST_ANSWERS, LONGEST_TOKEN = 2000, 50_000, 16_384

LOGINS_PER_SECOND, MOST_LOGINS = 2.0, 20.0
"""Tokens that are not known: so many a second over time, so many at once."""

MOST_NAMESPACES, ASKED_AT_ONCE = 2000, 16
"""Namespaces of which one person is asked for, and reviews under way at the same time."""

ANSWERED_SECONDS = 0.3
"""Seconds a look waits for reviews of more namespaces than are asked for at once; the next one has more."""

K = TypeVar("K")
V = TypeVar("V")

Ask = Callable[[Kind, Object], Awaitable[Object]]
"""Posts a review to the API server and returns the answer."""


class TooManyLoginsError(Exception):
    """Too many tokens that are not known, for now."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Identity of the viewer, by the API server."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Kept(Generic[K, V]):
    """Answers that count for a while, so many at most."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The answer, unless it is too old."""
        found = self._known.get(key)
        if found is None:
            return None
        if found[0] <= self._clock():
            del self._known[key]
            return None
        return found[1]

    def seconds_left(self, key: K) -> float:
        """Seconds for which its answer still counts."""
        found = self._known.get(key)
        return 0.0 if found is None else found[0] - self._clock()

    def put(self, key: K, value: V, seconds: float) -> None:
        """Keep ``value`` for so long."""
        self._known[key] = (self._clock() + seconds, value)
        self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def forget(self, key: K) -> None:
        """Keep it no longer."""
        self._known.pop(key, None)


class Reviews:
    """Access by the API server's reviews."""

    def __init__(self, ask: Ask, *, clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._people: Kept[bytes, Person | bool] = Kept(MOST_TOKENS, clock)
        self._may: Kept[tuple[Person, str, str], bool] = Kept(MOST_ANSWERS, clock)
        self._left, self._left_at = MOST_LOGINS, clock()
        self._seen: Kept[bytes, bool] = Kept(MOST_TOKENS, clock)
        self._turn = asyncio.Semaphore(ASKED_AT_ONCE)
        self._asking: dict[tuple[Person, str, str], asyncio.Task[bool]] = {}

    async def person(self, token: str) -> Person | None:
        """Owner of the token; None: nobody.

        Raises:
            TooManyLoginsError: not asked for, for now.
            OperatorError: the API server does not answer.
        """
        if not token or len(token) > LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            return None
        digest = hashlib.sha256(token.encode()).digest()
        known = self._people.get(digest)
        if known is not None:
            return known if isinstance(known, Person) else None
        if not self._seen.get(digest):  # one that was good before may be asked for again at any time
            self._take_a_turn()
        answer = await self._ask(TOKEN_REVIEW, TOKEN_REVIEW.object(metadata={}, spec={"token": token}))
        person = _person(answer)
        self._people.put(
            digest, person if person is not None else False, KEPT_SECONDS if person else REFUSED_SECONDS
        )
        if person is not None:
            self._seen.put(digest, True, SESSION_SECONDS)
        return person

    async def namespaces(self, person: Person, there_are: Iterable[str]) -> frozenset[str]:
        """Namespaces of ``there_are`` whose jobs the person may get; of very many those first by name.

        Of more than are asked for at once, those of which it is known soon: see :meth:`waits_for`.

        Raises:
            OperatorError: the API server does not answer.
        """
        asked = sorted(there_are)[:MOST_NAMESPACES]
        if await self._allowed(person, meta.TRAINING_JOB_PLURAL, ""):
            return frozenset(asked)
        answers = {
            name: asyncio.ensure_future(self._allowed(person, meta.TRAINING_JOB_PLURAL, name))
            for name in asked
        }
        if answers:
            await asyncio.wait(
                answers.values(), timeout=ANSWERED_SECONDS if len(answers) > ASKED_AT_ONCE else None
            )
        late = [answer for answer in answers.values() if not answer.done()]
        for answer in late:
            answer.cancel()  # the review goes on
        await asyncio.gather(*late, return_exceptions=True)
        known = {name: answer for name, answer in answers.items() if not answer.cancelled()}
        for error in [answer.exception() for answer in known.values()]:  # each is taken: asyncio logs others
            if error is not None:
                raise error
        return frozenset(name for name, answer in known.items() if answer.result())

    def waits_for(self, person: Person) -> int:
        """Number of namespaces in which it is not known yet what the person may see."""
        return sum(key[0] == person and self._may.get(key) is None for key in self._asking)

    async def sees_policies(self, person: Person) -> bool:
        """True if the person may get ClusterPolicies: pools and teams. Raises OperatorError: no answer."""
        return await self._allowed(person, meta.CLUSTER_POLICY_PLURAL, "")

    async def _allowed(self, person: Person, resource: str, namespace: str) -> bool:
        key = (person, resource, namespace)
        known = self._may.get(key)
        if known is not None and self._may.seconds_left(key) > RENEWED_SECONDS:
            return known
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._review(*key))
            asking.add_done_callback(functools.partial(self._answered, key))
        return known if known is not None else await asyncio.shield(asking)

    def _answered(self, key: tuple[Person, str, str], answer: asyncio.Task[bool]) -> None:
        del self._asking[key]
        if not answer.cancelled():
            answer.exception()  # whoever still waits for it is told

    async def _review(self, person: Person, resource: str, namespace: str) -> bool:
        what = {"group": meta.GROUP, "resource": resource, "verb": "get", "namespace": namespace}
        spec = {
            "resourceAttributes": what,
            "user": person.name,
            "uid": person.uid,
            "groups": list(person.groups),
            "extra": {name: list(values) for name, values in person.extra},
        }
        async with self._turn:
            review = SUBJECT_ACCESS_REVIEW.object(metadata={}, spec=spec)
            answer = await self._ask(SUBJECT_ACCESS_REVIEW, review)
        allowed = (answer.get("status") or {}).get("allowed") is True
        self._may.put((person, resource, namespace), allowed, KEPT_SECONDS)
        return allowed

    def _take_a_turn(self) -> None:
        now = self._clock()
        self._left = min(MOST_LOGINS, self._left + (now - self._left_at) * LOGINS_PER_SECOND)
        self._left_at = now
        if self._left < 1:
            raise TooManyLoginsError
        self._left -= 1


class OneKey:
    """Access to a page on this machine for whoever has its key, which sees everything that the page has.

    ``ask``: raises OperatorError where the API server is gone, for which watches wait: what was seen last
    would be shown as of now.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]] | None = None) -> None:
        self.key, self._ask = secrets.token_urlsafe(32), ask

    async def person(self, token: str) -> Person | None:
        """As of :class:`Reviews`."""
        given = token.encode("utf-8", "replace")
        return Person(name="this machine") if hmac.compare_digest(given, self.key.encode()) else None

    async def namespaces(self, person: Person, there_are: Iterable[str]) -> frozenset[str]:
        """As of :class:`Reviews`."""
        if self._ask is not None:
            await self._ask()
        return frozenset(there_are)

    def waits_for(self, person: Person) -> int:
        """As of :class:`Reviews`."""
        return 0

    async def sees_policies(self, person: Person) -> bool:
        """As of :class:`Reviews`."""
        return True


Access = Reviews | OneKey
"""Whoever lets people in."""


class Sessions:
    """Tokens of those who have logged in, by the value of their cookie.

    The browser never gets the token back: cookies of one host are sent to all its ports.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._tokens: Kept[str, str] = Kept(MOST_SESSIONS, clock)

    def begin(self, token: str) -> str:
        """A session; returns the value of its cookie."""
        name = secrets.token_urlsafe(32)
        self._tokens.put(name, token, SESSION_SECONDS)
        return name

    def token(self, name: str) -> str:
        """The token of a session; empty: there is none."""
        return self._tokens.get(name) or ""

    def end(self, name: str) -> None:
        """Log out."""
        self._tokens.forget(name)


def _person(answer: Object) -> Person | None:
    """Whom a TokenReview has found; None: nobody, or somebody without a name."""
    status: Any = answer.get("status") or {}
    user = status.get("user") or {}
    if status.get("authenticated") is not True or not user.get("username"):
        return None
    return Person(
        name=user["username"],
        uid=user.get("uid") or "",
        groups=tuple(user.get("groups") or ()),
        extra=tuple(sorted((name, tuple(values)) for name, values in (user.get("extra") or {}).items())),
    )
