"""Schedules and simulated traces as CSV, text, SVG pictures, and for chrome://tracing and Perfetto."""

import json
from collections.abc import Iterable, Mapping
from html import escape

from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule, ScheduleError
from ballast_policies.planning.schedules.simulate import Trace


def schedule_csv(schedule: Schedule) -> str:
    """One line a rank, actions separated by commas: what torch's runtime loads (``compute_only``).

    Raises:
        ScheduleError: the schedule updates weights between microbatches, which torch's runtime does not do.
    """
    if any(action.kind is Kind.UPDATE for row in schedule.actions for action in row):
        raise ScheduleError(f"{schedule.name} has updates between microbatches: the CSV form knows none")
    return "".join(",".join(str(action) for action in row) + "\n" for row in schedule.actions)


def timeline(trace: Trace, *, columns: int = 100) -> str:
    """A time line, one row of characters a rank: the microbatch's last digit, in turns of action.

    Forward ``0`` to ``9``, backward ``a`` to ``j`` (for microbatch 0 to 9 and again), weight half
    ``w``, update ``|``, idle ``.``.
    """
    if trace.makespan <= 0:
        return ""
    lines = [["."] * columns for _ in trace.busy]
    for span in trace.spans:
        letter = _letter(span.action)
        first = round(columns * (span.start / trace.makespan))
        for column in range(first, max(first + 1, round(columns * (span.end / trace.makespan)))):
            if column < columns:
                lines[span.rank][column] = letter
    return "\n".join(f"rank {rank:>2} {''.join(line)}" for rank, line in enumerate(lines))


def _letter(action: Action) -> str:
    digit = action.microbatch % 10
    return {
        Kind.FORWARD: str(digit),
        Kind.BACKWARD: chr(ord("a") + digit),
        Kind.BACKWARD_INPUT: chr(ord("a") + digit),
        Kind.BACKWARD_WEIGHT: "w",
        Kind.UPDATE: "|",
    }[action.kind]


_COLOURS = {
    Kind.FORWARD: "#6baed6",
    Kind.BACKWARD: "#74c476",
    Kind.BACKWARD_INPUT: "#74c476",
    Kind.BACKWARD_WEIGHT: "#fdae6b",
    Kind.UPDATE: "#9e9ac8",
}
_LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.UPDATE: "update",
}
_WIDTH, _ROW, _LEFT, _TOP = 1000, 28, 70, 34


def schedule_svg(trace: Trace) -> str:
    """The picture; later stages of a rank are paler, microbatches are numbered where there is room."""
    schedule = trace.schedule
    scale = (_WIDTH - _LEFT - 10) / (trace.makespan or 1.0)
    height = _TOP + schedule.ranks * _ROW + 40
    title = f"{schedule.name}: {trace.makespan:.4g} s, {trace.idle_fraction:.1%} idle (simulated)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for rank in range(schedule.ranks):
        middle = _TOP + rank * _ROW + _ROW * 0.65
        parts.append(f'<text x="8" y="{middle:.1f}">rank {rank}</text>')
    for span in trace.spans:
        x, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
        y = _TOP + span.rank * _ROW + 2
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if span.rank in holders]
        opacity = 1.0 - 0.5 * own.index(span.action.stage) / max(1, len(own))
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[span.action.kind]}" fill-opacity="{opacity:.2f}" '
            f'stroke="#333" stroke-width="0.5"><title>{span.action}</title></rect>'
        )
        if wide >= 12 and span.action.kind is not Kind.UPDATE:
            parts.append(
                f'<text x="{x + wide / 2:.2f}" y="{y + _ROW * 0.6:.1f}" text-anchor="middle">'
                f"{span.action.microbatch}</text>"
            )
    parts += _legend(trace, height - 14)
    return "\n".join([*parts, "</svg>\n"])


def _legend(trace: Trace, y: int) -> list[str]:
    kinds = {span.action.kind for span in trace.spans}
    parts, x = [], _LEFT
    for kind in Kind:
        if kind in kinds:
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y}">{_LABELS[kind]}</text>')
            x += 150
    return parts


def chrome_trace(trace: Trace) -> str:
    """JSON of a simulated step: a row a rank, an event an action."""
    rows: dict[int, list[TraceEvent]] = {rank: [] for rank in range(trace.schedule.ranks)}
    for span in trace.spans:
        where = {"stage": span.action.stage, "microbatch": span.action.microbatch}
        label = _LABELS[span.action.kind]
        rows[span.rank].append((str(span.action), label, span.start, span.end, where))
    return trace_json(f"{trace.schedule.name} (simulated)", rows)


TraceEvent = tuple[str, str, float, float, Mapping[str, int]]
"""Name, category, begin and end in seconds, and further arguments."""


def trace_json(name: str, rows: Mapping[int, Iterable[TraceEvent]]) -> str:
    """JSON for chrome://tracing and Perfetto: a process, a thread a rank; times in microseconds."""
    events: list[dict[str, object]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    for rank, row in rows.items():
        thread = {"name": f"rank {rank}"}
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": thread})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": what,
                "cat": category,
                "ts": round(begin * 1e6, 3),
                "dur": round((end - begin) * 1e6, 3),
                "args": arguments,
            }
            for what, category, begin, end, arguments in row
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
