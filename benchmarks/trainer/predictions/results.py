"""Rows of predicted and measured plans, which several calls may share, and their sums."""

import json
import math
import pathlib
import statistics
import time


class Results:
    """Rows by kind (``time``, ``memory``) and plan; in a file, if there is one."""

    def __init__(self, path, seed):
        self._path, self._seed = None if path is None else pathlib.Path(path), seed
        self.rows = {"time": {}, "memory": {}}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                row = json.loads(line)
                if row["seed"] == seed:
                    self.rows[row["kind"]][row["number"]] = row

    def add(self, kind, plans, measure, ends):
        """Measure those of (number, plan) that are missing, until the time ``ends``."""
        left = [(number, plan) for number, plan in plans if number not in self.rows[kind]]
        if not left:
            return
        found = measure([plan for _, plan in left])
        for number, _ in left:
            if time.monotonic() >= ends:
                return
            row = {"kind": kind, "seed": self._seed, "number": number, **next(found)}
            self.rows[kind][number] = row
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def of_times(rows):
    """Errors of the step times."""
    errors = [abs(row["error_percent"]) for row in rows]
    return {
        "plans": len(errors),
        "mean_error_percent": round(statistics.mean(errors or [math.nan]), 2),
        "worst_error_percent": max(errors, default=math.nan),
        "within_5_percent": sum(error <= 5 for error in errors),
        "target_percent": 5,
    }


def of_memory(rows):
    """Errors of the ranks' memory."""
    errors = [abs(error) for row in rows for error in row["error_percent"]]
    return {
        "memory_plans": len(rows),
        "memory_ranks": len(errors),
        "memory_mean_error_percent": round(statistics.mean(errors or [math.nan]), 2),
        "memory_worst_error_percent": max(errors, default=math.nan),
        "memory_within_10_percent": sum(error <= 10 for error in errors),
        "memory_target_percent": 10,
    }
