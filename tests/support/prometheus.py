"""A Prometheus with what was scraped from a program, to evaluate the expressions of dashboards and alerts."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_port
from tests.support.waiting import WAIT_SECONDS, eventually

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="promtool and prometheus are not installed (Debian: apt-get install prometheus)",
)


class Prometheus:
    """Its database has each text of ``/metrics`` as if it had been scraped twice a minute for 20 minutes.

    Args:
        scraped: the texts, each with the labels that a scrape adds.
        folder: for its files.
    """

    def __init__(self, scraped: Iterable[tuple[str, dict[str, str]]], folder: Path) -> None:
        self._end = int(time.time()) - 3600
        lines = [
            f"{sample.name}{_labels({**sample.labels, **added})} {sample.value} {at}\n"
            for text, added in scraped
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            for at in range(self._end - 1200, self._end + 1, 30)
        ]
        (folder / "scraped").write_text("".join(lines) + "# EOF\n")
        (folder / "empty.yml").write_text("")
        create = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "scraped", "data"]
        subprocess.run(create, cwd=folder, check=True, capture_output=True, timeout=WAIT_SECONDS)
        self._address, self._log = f"127.0.0.1:{free_port()}", folder / "prometheus.log"
        options = ["--config.file=empty.yml", "--storage.tsdb.path=data"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", *options, f"--web.listen-address={self._address}"],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        eventually(self._ready, "Prometheus to be ready", self._log.read_text)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)

    def _ready(self) -> bool:
        try:
            return self._get("-/ready") != b""
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._address}/{path}", timeout=WAIT_SECONDS) as answer:
            return bytes(answer.read())

    def labels(self, expression: str) -> list[dict[str, str]]:
        """The labels of each series that the expression has; Grafana's variables are filled in."""
        for variable, value in (("$__rate_interval", "5m"), ("$namespace", ".*"), ("$job", "one")):
            expression = expression.replace(variable, value)
        query = urllib.parse.urlencode({"query": expression, "time": self._end})
        answer: dict[str, Any] = json.loads(self._get(f"api/v1/query?{query}"))
        return [series["metric"] for series in answer["data"]["result"]]

    def lacks(self, expression: str, text: str) -> str:
        """What the expression lacks of the labels that ``text`` names; empty: nothing."""
        found = self.labels(re.sub(r"([<>]) (?=\d)", r"\1 bool ", expression))
        needed = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text))
        missing = needed - set.intersection(*(set(labels) for labels in found)) if found else {"any series"}
        return ", ".join(sorted(missing))


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"
