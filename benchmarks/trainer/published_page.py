"""Write lab/docs/published-dynamic-models.md: DynMo's and SEMI-migration's published values beside ours.

    python benchmarks/trainer/published_page.py [--measure]

The page is written from ``published_recorded.json``; ``--measure`` simulates everything again (8 to 720
ranks, a few minutes of one core) and records it. Only a small model is trained, for resizing:
what real ranks show is in docs/figures.md.
"""

import json
from pathlib import Path

import click
from dynamic_models.balancing import (
    cases_judged,
    overheads,
    overheads_judged,
    repacking,
    repacking_judged,
    scaling,
    scaling_by_ranks,
    six_cases,
    unstable_judged,
    unstable_network,
)
from dynamic_models.page import page
from dynamic_models.stragglers_in_groups import late_ranks, migration
from resizing import homogeneous, imputations, one_late

__all__ = ["cases_judged", "overheads_judged", "repacking_judged", "unstable_judged"]
"""Names for ``ballast reproduce``."""

HERE = Path(__file__).resolve()
PAGE = HERE.parents[2] / "lab" / "docs" / "published-dynamic-models.md"
RECORDED = HERE.with_name("published_recorded.json")


def record():
    parts = (
        six_cases,
        scaling_by_ranks,
        scaling,
        overheads,
        repacking,
        unstable_network,
        migration,
        late_ranks,
    )
    resized = {part.__name__: str(part()) for part in (imputations, homogeneous, one_late)}
    return {part.__name__: part() for part in parts} | resized


@click.command(help=__doc__)
@click.option("--measure", is_flag=True, help="Simulate everything again, and record it.")
def main(measure):
    if measure:
        RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RECORDED.read_text())))
    click.echo(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
