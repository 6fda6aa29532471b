"""The dynamic cases in a form that acts within a few steps of a small model."""

from typing import Any

SHORT: dict[str, dict[str, Any]] = {
    "freezing": {"target": 0.5},
    "pruning": {"target": 0.95},
    "sparseAttention": {"target": 0.9, "attention": {"blockSize": 4, "coverage": 0.3}},
    "earlyExit": {"target": 0.8, "exits": {"threshold": 0.9, "sampled": 0.1}},
    "mixtureOfDepths": {"target": 0.75},
    "mixtureOfExperts": {"experts": {"count": 4, "topK": 2, "balance": "bias"}},
}
"""By kind, what it needs beside the steps."""


def change(kind: str, **steps: int) -> dict[str, Any]:
    """A change as a configuration has it; ``steps`` (startStep, ...) where the kind follows steps."""
    return {"kind": kind, **({} if kind == "mixtureOfExperts" else steps), **SHORT[kind]}
