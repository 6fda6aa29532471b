"""Export of a simulated schedule to the trace format of chrome://tracing and Perfetto."""

import json

from ballast_policies.planning.schedules.action import Kind
from ballast_policies.planning.schedules.simulate import Trace

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.UPDATE: "update",
}


def chrome_trace(trace: Trace) -> str:
    """JSON: one process, one thread a rank, one complete event ("X") an action; times in microseconds."""
    name = trace.schedule.name
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{name} (simulated)"}}
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for rank in range(trace.schedule.ranks)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "name": str(span.action),
            "cat": _NAMES[span.action.kind],
            "ts": round(span.start * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
            "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
        }
        for span in trace.spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
