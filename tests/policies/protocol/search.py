"""Exhaustive search over explicit states: breadth first, with the shortest way to what must not be."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

State = Hashable
Step = tuple[str, bool, State]
"""(what happened, whether it was a fault, the state after it)."""


class ViolationError(AssertionError):
    """Something that must never be; its text has the shortest way there."""


@dataclasses.dataclass
class Explored:
    """All reachable states.

    Attributes:
        steps: state's number -> (what happened, whether it was a fault, number of the state after it).
        ends: numbers of the states in which all is done.
        complete: False where the limit on states was reached.
    """

    states: list[State]
    steps: list[list[tuple[str, bool, int]]]
    came_from: list[tuple[int, str]]
    ends: set[int]
    complete: bool = True

    @property
    def transitions(self) -> int:
        return sum(len(steps) for steps in self.steps)

    def way_to(self, number: int) -> str:
        """What happened on the shortest way from the first state, one thing a line."""
        lines = []
        while number:
            number, label = self.came_from[number]
            lines.append(label)
        return "\n".join(f"  {i + 1}. {line}" for i, line in enumerate(reversed(lines)))


def explore(
    first: State,
    steps_of: Callable[[Any], Iterable[Step]],
    *,
    is_end: Callable[[Any], bool],
    check: Callable[[Any], str],
    most_states: int,
) -> Explored:
    """Every state that can be reached from ``first``, up to ``most_states``.

    Raises:
        ViolationError: ``check`` (empty text: all is well) or a step says so.
    """
    numbers: dict[State, int] = {first: 0}
    found = Explored([first], [], [(0, "")], set())
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        number = len(found.steps)
        following: list[tuple[str, bool, int]] = []
        found.steps.append(following)
        if is_end(state):
            found.ends.add(number)
        try:
            for label, fault, after in steps_of(state):
                known = numbers.get(after)
                if known is None:
                    if len(found.states) >= most_states:
                        found.complete = False
                        continue
                    known = numbers[after] = len(found.states)
                    found.states.append(after)
                    found.came_from.append((number, label))
                    problem = check(after)
                    if problem:
                        raise ViolationError(f"{problem}\n{found.way_to(known)}")
                    waiting.append(after)
                following.append((label, fault, known))
        except ViolationError as violation:
            text = str(violation)
            if "\n" in text:
                raise
            raise ViolationError(f"{text}\n{found.way_to(number)}") from None
    return found


def check_an_end_is_always_reachable(found: Explored) -> None:
    """From every state.

    Raises:
        ViolationError: with the shortest way to a state from which there is none.
    """
    before: list[list[int]] = [[] for _ in found.states]
    for number, steps in enumerate(found.steps):
        for _, _, after in steps:
            before[after].append(number)
    good, waiting = set(found.ends), deque(found.ends)
    while waiting:
        for number in before[waiting.popleft()]:
            if number not in good:
                good.add(number)
                waiting.append(number)
    for number in range(len(found.states)):
        if number not in good:
            raise ViolationError(f"no end can be reached\n{found.way_to(number)}\n{found.states[number]}")


def check_every_fair_run_ends(found: Explored) -> None:
    """Without further faults there is no way to run without end, if what stays possible is done at some time.

    A set of states in which a run could stay is harmless where some step is possible in all of them and leads
    out of the set from each: that step is taken at some time.

    Raises:
        ViolationError: with the shortest way to a state of a set where no step does that.
    """
    calm = [[(label, after) for label, fault, after in steps if not fault] for steps in found.steps]
    for component in _components([[after for _, after in steps] for steps in calm]):
        inside = set(component)
        stays = any(after in inside for number in component for _, after in calm[number])
        if not stays or inside <= found.ends:
            if not stays and not calm[component[0]] and component[0] not in found.ends:
                number = component[0]
                raise ViolationError(
                    f"nothing can happen any more\n{found.way_to(number)}\n{found.states[number]}"
                )
            continue
        leaving: set[str] | None = None
        for number in component:
            labels = {label for label, _ in calm[number]}
            labels -= {label for label, after in calm[number] if after in inside}
            leaving = labels if leaving is None else leaving & labels
        if not leaving:
            number = min(component)
            labels = sorted({label for n in component for label, after in calm[n] if after in inside})
            raise ViolationError(f"it can go round without end: {labels}\n{found.way_to(number)}")


def _components(after: list[list[int]]) -> Iterator[list[int]]:
    """Strongly connected components (Tarjan, without recursion)."""
    index: list[int] = [-1] * len(after)
    low = [0] * len(after)
    on_stack = bytearray(len(after))
    stack: list[int] = []
    count = 0
    for root in range(len(after)):
        if index[root] >= 0:
            continue
        work = [(root, iter(after[root]))]
        index[root] = low[root] = count
        count += 1
        stack.append(root)
        on_stack[root] = 1
        while work:
            node, successors = work[-1]
            for child in successors:
                if index[child] < 0:
                    index[child] = low[child] = count
                    count += 1
                    stack.append(child)
                    on_stack[child] = 1
                    work.append((child, iter(after[child])))
                    break
                if on_stack[child]:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack[member] = 0
                        component.append(member)
                        if member == node:
                            break
                    yield component
