"""Parsers of what users' files, other components' labels and earlier runs hold."""

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_client.messages import read_plan as read_clients_plan
from ballast_lab.prices.logs.folder import read_market
from ballast_localcluster.errors import NodesFileError
from ballast_localcluster.nodes.node import read_nodes
from ballast_operator.api.read import InvalidObject, read_cluster_policy
from ballast_operator.cli.allocate.command import read_problem
from ballast_operator.cli.plan import input as plan_input
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.contract import ContractError
from ballast_policies.gpus.catalogue import CatalogueError, parse_gpus
from ballast_policies.gpus.labels import gpu_of_node
from ballast_policies.prices.feed import FeedPrice, read_feed
from ballast_policies.prices.offers import PriceLogError
from ballast_policies.simulator.elastic.workload_file import read_workload
from ballast_trainer.checkpoints.folder_lock import Owner
from ballast_trainer.checkpoints.index import _read_index
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.errors import CheckpointError, ConfigurationError
from ballast_trainer.replay import read_loads

from tests.contract.examples import EXAMPLES
from tests.fuzz import file_seeds as seeds
from tests.fuzz import seeds as fuzz_seeds
from tests.fuzz.mutation import Choose, mutated
from tests.fuzz.parser import Parser, document, lines, read_file, text


def yaml_text(example: Any) -> Callable[[Choose], str]:
    """JSON, which is YAML, with some quotes left out: texts become dates, numbers, references, directives."""
    as_text = text(example)

    def make(choose: Choose) -> str:
        found = as_text(choose)
        for _ in range(choose(8)):
            places = [place for place, letter in enumerate(found) if letter == '"']
            if places:
                place = places[choose(len(places))]
                instead = ("", "!", "&a ", "*a ", "\n", "? ", "<<: ", "|")[choose(8)]
                found = found[:place] + instead + found[place + 1 :]
        return found

    return make


def _read_price(value: str) -> object:
    """Never fails: what cannot be used leaves the last price in force, with the reason."""
    before = FeedPrice(price=1.0, time=1.7e9)
    reading = read_feed(value, before, now=1.76e9, stale_after=600.0, on_demand=2.5, why_missing="")
    assert reading.known is not None
    assert reading.known.price > 0
    assert reading.problem is None or "To fix:" in reading.message
    return reading


def _meet_owner(path: Path) -> object:
    """What a run does with the owner that a lock file names."""
    owner = Owner.read(path)
    if owner is None:
        return None
    own = Owner.this_process(4)
    return owner.gives_way_to(own), own.gives_way_to(owner), owner.lives_here, str(owner)


def _read_folder(name: str) -> Callable[[str], object]:
    """A folder of price logs: one good one, and this file."""

    def read(content: str) -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "aws.json").write_text(json.dumps(fuzz_seeds.AWS_PRICES))
            (Path(folder) / name).write_text(content, errors="surrogatepass")
            return read_market(Path(folder))

    return read


def _labels(choose: Choose) -> dict[str, str]:
    found = mutated(seeds.GPU_LABELS, choose)
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _as_toml(choose: Choose) -> str:
    """A row of the catalogue; JSON's numbers, texts and lists are TOML's."""
    row = mutated(seeds.GPU_ROW, choose)
    pairs = row.items() if isinstance(row, dict) else ()
    return "[[gpu]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in pairs)


def _read_a_checkpoints_index(content: bytes) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own classes warn when they are made
        return _read_index(content)


def _index(choose: Choose) -> bytes:
    """A pickle with some bytes changed."""
    content = bytearray(seeds.index())
    for _ in range(choose(7)):
        content[choose(len(content))] = choose(256)
    return bytes(content[: choose(len(content))] if choose(8) == 0 else content)


FILE_PARSERS = (
    Parser(
        name="allocate-configurations",
        make=text(seeds.ELASTIC_PROBLEM),
        read=read_problem,
        errors=(ProblemError,),
    ),
    Parser(
        name="elastic-workload",
        make=text(seeds.ELASTIC_FILE),
        read=lambda content: read_workload(content, sizes="all"),
        errors=(ContractError,),
    ),
    Parser(name="price-feed", make=text(seeds.PRICE), read=_read_price),
    Parser(
        name="cluster-policy-feeds",
        make=document(seeds.FEED_POLICY),
        read=lambda found: read_cluster_policy(found) if isinstance(found, dict) else None,
        errors=(InvalidObject,),
    ),
    Parser(
        name="price-folder",
        make=lines(seeds.AZURE_SIZES, ","),
        read=_read_folder("sizes.csv"),
        errors=(PriceLogError,),
    ),
    Parser(name="gpu-catalogue", make=_as_toml, read=parse_gpus, errors=(CatalogueError,)),
    Parser(name="gpu-labels", make=_labels, read=gpu_of_node),
    Parser(
        name="loads", make=lines(seeds.LOADS, ""), read=read_file(read_loads), errors=(ConfigurationError,)
    ),
    Parser(
        name="client-plan",
        make=text(json.loads(EXAMPLES["plan"].to_json())),
        read=read_clients_plan,
        errors=(ValueError,),
    ),
    Parser(
        name="trainer-file",
        make=yaml_text(seeds.TRAINER_FILE),
        read=read_file(lambda path: read_config(path, ())),
        errors=(ConfigurationError,),
    ),
    Parser(
        name="profile-file",
        make=yaml_text(seeds.PROFILE),
        read=read_file(plan_input.read_profile),
        errors=(click.ClickException,),
    ),
    Parser(
        name="nodes-file",
        make=yaml_text(seeds.NODES),
        read=read_file(read_nodes),
        errors=(NodesFileError,),
    ),
    Parser(name="manifest", make=text(seeds.MANIFEST), read=Manifest.from_json, errors=(ValueError,)),
    Parser(name="checkpoint-index", make=_index, read=_read_a_checkpoints_index, errors=(CheckpointError,)),
    Parser(name="folder-owner", make=text(seeds.OWNER), read=read_file(_meet_owner)),
)
