"""Devices to stages by tiling the grid with dominoes (AMP supplement, figure 5).

A domino is tensor x data devices, one stage; it lies upright (tensor-parallel groups down a column,
where links are fastest) or turned (groups along a row).  Stages are numbered in the order in which
dominoes are laid, row by row.
"""

from collections.abc import Callable, Iterator

from ballast_policies.planning.planners.amp.model import Placement

Shapes = Callable[[], tuple[bool, ...]]


def tilings(rows: int, columns: int, *, tensor: int, data: int) -> Iterator[Placement]:
    """All tilings of a rows x columns grid; none where the domino does not fit."""
    turns = (False,) if tensor == data == 1 else (False, True)
    yield from _tile(rows, columns, tensor, data, lambda: turns)


def sample_tiling(
    rows: int, columns: int, *, tensor: int, data: int, choose: Callable[[], float]
) -> Placement | None:
    """One tiling by coin tosses, first fit from the top left; None where there is no tiling.

    Args:
        rows: of the grid.
        columns: of the grid.
        tensor: size of a domino, along its tensor-parallel groups.
        data: size of a domino, across them.
        choose: a random number in [0, 1) each call, e.g. ``generator.random``.
    """

    def turns() -> tuple[bool, ...]:
        return (False, True) if choose() < 0.5 else (True, False)

    return next(_tile(rows, columns, tensor, data, turns), None)


def _tile(rows: int, columns: int, tensor: int, data: int, turns: Shapes) -> Iterator[Placement]:
    if rows * columns % (tensor * data):
        return
    yield from _extend(rows, columns, tensor, data, turns, frozenset(), ())


def _extend(
    rows: int,
    columns: int,
    tensor: int,
    data: int,
    turns: Shapes,
    taken: frozenset[int],
    laid: Placement,
) -> Iterator[Placement]:
    free = next((cell for cell in range(rows * columns) if cell not in taken), None)
    if free is None:
        yield laid
        return
    top, left = divmod(free, columns)
    for turned in turns():
        if turned and tensor == data == 1:
            continue
        high, wide = (data, tensor) if turned else (tensor, data)
        if top + high > rows or left + wide > columns:
            continue
        block = [[(top + r) * columns + left + c for c in range(wide)] for r in range(high)]
        cells = {cell for row in block for cell in row}
        if cells & taken:
            continue
        groups = block if turned else [list(group) for group in zip(*block, strict=True)]
        stage = tuple(tuple(group) for group in groups)
        yield from _extend(rows, columns, tensor, data, turns, taken | cells, (*laid, stage))
