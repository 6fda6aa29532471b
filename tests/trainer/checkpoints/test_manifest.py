"""A checkpoint's manifest as a file."""

import dataclasses
import json

import pytest
from ballast_trainer.checkpoints.manifest import Manifest

MANIFEST = Manifest(
    step=7, layer_count=4, seed=3, files={"__0_0.distcp": 2**32 - 1}, loss_scale=(2.0, 5), optimizer="adamw"
)


def test_a_manifest_is_read_as_it_was_written():
    """Fields of a later release are ignored."""
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    later = {**dataclasses.asdict(MANIFEST), "compression": "zstd"}
    assert Manifest.from_json(json.dumps(later)) == MANIFEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        MANIFEST.to_json().replace("7", "NaN"),
        MANIFEST.to_json().replace("7", '"seven"'),
        MANIFEST.to_json().replace("4294967295", '"all"'),
    ],
    ids=["empty", "list", "no fields", "nested", "not a number", "step as text", "checksum as text"],
)
def test_what_is_no_manifest_is_refused(text):
    """As a ValueError, which makes the checkpoint corrupt; no other error ends the resume."""
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(text)
