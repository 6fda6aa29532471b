"""Pictures of the documentation, drawn from data: the two loops, a round, a rebalance and a repack.

Each has a panel of its own colour, light or dark as the reader's system asks: it is readable on any page.
"""

from collections.abc import Mapping, Sequence
from html import escape

from ballast_policies.allocation.problem import Job
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.subset import RankSubsets
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.repack import repack
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, RoundSettings, RoundState

STYLE = """
    svg { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif }
    .panel { fill: #ffffff; stroke: #d0d7de }
    .box { fill: #f1f5f9; stroke: #64748b }
    .bar { stroke: #ffffff }
    text { fill: #1f2937 }
    .on { fill: #ffffff }
    .dim { fill: #5b6675; font-size: 12px }
    .head { font-weight: 600 }
    .line { stroke: #64748b; stroke-width: 1.5; fill: none }
    .tip { fill: #64748b }
    .a { fill: #2563a8 } .b { fill: #b45309 } .c { fill: #2f7d4f } .off { fill: none; stroke: #94a3b8; stroke-dasharray: 4 3 }
    @media (prefers-color-scheme: dark) {
      .panel { fill: #161b22; stroke: #3d444d }
      .box { fill: #222b36; stroke: #8b98a9 }
      .bar { stroke: #161b22 }
      text { fill: #e6edf3 }
      .on { fill: #ffffff }
      .dim { fill: #9aa7b5 }
      .line { stroke: #8b98a9 }
      .tip { fill: #8b98a9 }
    }
"""  # noqa: E501
LAYERS, RANKS, MICROBATCHES = 16, 4, 8
FROZEN, FROZEN_SECONDS = 12, 0.25
"""Layers whose backward is gone, and what is left of their cost: of 1 each before."""


def pictures() -> Mapping[str, str]:
    """File below docs/pictures -> SVG."""
    return {"loops.svg": loops(), "round.svg": rounds(), "repack.svg": repacked()}


def loops() -> str:
    """Loops of decisions, and the messages between operator and trainer."""
    parts = [
        *_box(24, 24, 322, "TrainingJob, ClusterPolicy", "what people write"),
        *_box(454, 24, 322, "model, data, image", "what people bring"),
        *_box(24, 116, 322, "Operator: cluster loop", "which job on which GPUs, round by round"),
        *_box(454, 116, 322, "Trainer: job loop", "which layers on which of the job's GPUs"),
        *_box(24, 250, 322, "pods on nodes of pools", "gangs start, shrink, grow and end whole"),
        *_box(454, 250, 322, "ranks of the pipeline", "layers move between two steps, no rank restarts"),
        *_arrow(185, 80, 185, 114),
        *_arrow(615, 80, 615, 114),
        *_arrow(150, 172, 150, 248),
        *_arrow(220, 248, 220, 174),
        *_arrow(580, 172, 580, 248),
        *_arrow(650, 248, 650, 174),
        _text(140, 214, "writes", "dim", "end"),
        _text(230, 214, "watches", "dim"),
        _text(570, 214, "new cut", "dim", "end"),
        _text(660, 214, "seconds, bytes", "dim"),
        *_arrow(348, 132, 452, 132),
        *_arrow(452, 158, 348, 158),
        _text(400, 125, "plan", "dim", "middle"),
        _text(400, 176, "report, proposal,", "dim", "middle"),
        _text(400, 191, "acknowledgement", "dim", "middle"),
    ]
    return _svg(800, 330, "The cluster loop and the job loop", parts)


SHARES = {"a": {"v100": 0.75, "p100": 0.25}, "b": {"v100": 0.25, "p100": 0.5}, "c": {"p100": 0.25}}
"""Job -> GPU type -> the part of its time that a policy has promised; one GPU of each type."""


def rounds(count: int = 8) -> str:
    """Rounds that realise shares, decided by :func:`decide_round`."""
    parts = [_text(24, 40, "Shares of a policy", "head"), _text(330, 40, "Rounds that realise them", "head")]
    for row, (job, shares) in enumerate(SHARES.items()):
        y = 62 + 44 * row
        parts += [_text(24, y + 20, f"job {job}")]
        parts += [
            _text(80, y + 29 - 9 * len(shares) + 18 * n, f"{share:.0%} of its time on {gpu}", "dim")
            for n, (gpu, share) in enumerate(shares.items())
        ]
    gpus = ("v100", "p100")
    nodes = [Node(name=gpu, pool=gpu, gpu_type=gpu, gpus=1) for gpu in gpus]
    jobs = [Job(name=job, gpus=1, throughput=dict.fromkeys(shares, 1.0)) for job, shares in SHARES.items()]
    memory = RoundMemory.from_running({}, {}, SHARES, now=0.0)
    running: Mapping[str, Placement] = {}
    for number in range(count):
        now = float(number)
        memory = memory.until(now, SHARES, running=running, round_seconds=1.0)
        state = RoundState(
            received=memory.received,
            promised=memory.promised,
            running=running,
            running_since=dict.fromkeys(running, 0.0),
        )
        settings = RoundSettings(round_seconds=1.0)
        decided = decide_round(
            Question(now=now, shares=SHARES, jobs=jobs, nodes=nodes, state=state, settings=settings)
        )
        running = decided.placements
        for job, placement in running.items():
            x, y = 390 + 48 * number, 66 + 60 * gpus.index(placement.gpu_type)
            parts += [_bar(x, y, 48, 40, job), _text(x + 24, y + 25, job, "on", "middle")]
    parts += [_text(330, 66 + 60 * row + 25, gpu) for row, gpu in enumerate(gpus)]
    parts += [_text(390 + 48 * n + 24, 200, f"{n + 1}", "dim", "middle") for n in range(count)]
    return _svg(800, 220, "Shares, and the rounds that realise them", parts)


def repacked() -> str:
    """One job's layers on its ranks: at the start, after a rebalance, and after a repack."""
    before = [1.0] * LAYERS
    after = [FROZEN_SECONDS] * FROZEN + [1.0] * (LAYERS - FROZEN)
    start = even_partition(LAYERS, RANKS)
    moved = exact_partition(after, RANKS)
    pace = predict_step_seconds(start.loads(before), MICROBATCHES)
    kept = repack(RankSubsets(moved, after), microbatches=MICROBATCHES, reference_step_seconds=pace)
    parts: list[str] = []
    panels = (
        (f"start: {LAYERS} layers alike", start, before, range(RANKS)),
        (f"layers 0-{FROZEN - 1} freeze: rebalanced", moved, after, range(RANKS)),
        ("repacked: two GPUs are free", kept.partition, after, kept.kept_ranks),
    )
    for column, (title, partition, seconds, ranks) in enumerate(panels):
        left = 24 + 262 * column
        parts.append(_text(left, 40, title, "head"))
        for rank in range(RANKS):
            y = 60 + 46 * rank
            parts.append(_text(left, y + 21, str(rank), "dim"))
            if rank not in ranks:
                parts += [
                    f'<rect class="off" x="{left + 16}" y="{y}" width="200" height="32"/>',
                    _text(left + 26, y + 21, "released", "dim"),
                ]
                continue
            place = list(ranks).index(rank)
            parts += _layers(left + 16, y, partition.bounds[place : place + 2], seconds)
    parts.append(_text(24, 258, "A row is a rank; a block is a layer, as wide as its seconds.", "dim"))
    return _svg(800, 276, "Layers move between ranks, and ranks are released", parts)


def _layers(x: float, y: float, bounds: Sequence[int], seconds: Sequence[float]) -> list[str]:
    parts = []
    for layer in range(*bounds):
        width = 50 * seconds[layer]
        parts.append(_bar(x, y, width, 32, "c" if seconds[layer] < 1 else "a"))
        if width > 20:
            parts.append(_text(x + width / 2, y + 21, str(layer), "on", "middle"))
        x += width
    return parts


def _box(x: float, y: float, width: float, title: str, under: str) -> list[str]:
    middle = x + width / 2
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="56" rx="6"/>',
        _text(middle, y + 24, title, "head", "middle"),
        _text(middle, y + 43, under, "dim", "middle"),
    ]


def _arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    """A line along one axis, with a tip at its end."""
    along = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    back = to_x - 8 * along[0], to_y - 8 * along[1]
    side = 4 * along[1], 4 * along[0]
    tip = f"{to_x},{to_y} {back[0] + side[0]},{back[1] + side[1]} {back[0] - side[0]},{back[1] - side[1]}"
    return [
        f'<line class="line" x1="{x}" y1="{y}" x2="{back[0]}" y2="{back[1]}"/>',
        f'<polygon class="tip" points="{tip}"/>',
    ]


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="bar {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )
