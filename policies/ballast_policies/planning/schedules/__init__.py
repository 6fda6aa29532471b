"""Pipeline schedules as data: builders, validation, simulation, idle time, exports.

A schedule is, for every rank, the order of its actions (``2F0``: stage 2, forward, microbatch 0).
"""

from ballast_policies.planning.schedules.bubbles import (
    BubbleSplit,
    bubble_of_data_parallel,
    chimera_bubble,
    optimal_active_minibatches,
    pipeline_bubble,
    split_bubble,
    split_measured_bubble,
)
from ballast_policies.planning.schedules.builders.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.builders.synchronous import (
    forward_only,
    gpipe,
    gpipe_replicated,
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
    looped_breadth_first,
    one_forward_one_backward,
    one_forward_one_backward_replicated,
    rounds_of,
)
from ballast_policies.planning.schedules.builders.v_shaped import dual_pipe_v, zero_bubble_v
from ballast_policies.planning.schedules.costs import StageCosts, even_costs, stage_costs
from ballast_policies.planning.schedules.exports import (
    chrome_trace,
    schedule_csv,
    schedule_from_csv,
    schedule_svg,
    schedule_text,
    timeline,
)
from ballast_policies.planning.schedules.registry import (
    DEFAULT_SCHEDULE,
    DEFAULT_STAGES_PER_RANK,
    SCHEDULES,
    ScheduleKind,
    build_schedule,
    replicable_schedules,
    stages_of,
    trained_schedules,
)
from ballast_policies.planning.schedules.schedule import Action, Kind, Schedule, ScheduleError, WeightRule
from ballast_policies.planning.schedules.simulate import Span, Trace, simulate
from ballast_policies.planning.schedules.validate import (
    ScheduleFacts,
    validate,
    versions_held,
    weight_versions,
)

__all__ = [
    "DEFAULT_SCHEDULE",
    "DEFAULT_STAGES_PER_RANK",
    "SCHEDULES",
    "Action",
    "BubbleSplit",
    "Kind",
    "Schedule",
    "ScheduleError",
    "ScheduleFacts",
    "ScheduleKind",
    "Span",
    "StageCosts",
    "Trace",
    "WeightRule",
    "bubble_of_data_parallel",
    "build_schedule",
    "chimera_bubble",
    "chrome_trace",
    "double_buffered",
    "dual_pipe_v",
    "even_costs",
    "forward_only",
    "gpipe",
    "gpipe_replicated",
    "interleaved_one_forward_one_backward",
    "interleaved_zero_bubble",
    "looped_breadth_first",
    "one_forward_one_backward",
    "one_forward_one_backward_replicated",
    "optimal_active_minibatches",
    "pipedream",
    "pipeline_bubble",
    "replicable_schedules",
    "rounds_of",
    "schedule_csv",
    "schedule_from_csv",
    "schedule_svg",
    "schedule_text",
    "simulate",
    "split_bubble",
    "split_measured_bubble",
    "stage_costs",
    "stages_of",
    "timeline",
    "trained_schedules",
    "validate",
    "versions_held",
    "weight_versions",
    "zero_bubble_v",
]
