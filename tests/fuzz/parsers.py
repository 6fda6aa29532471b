"""Every parser of what a pod, a user, a file or an older operator has written, with its documented errors."""

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ballast_client.messages import read_plan as read_clients_plan
from ballast_lab.prices.logs.availability_log import parse_availability
from ballast_lab.prices.logs.azure_prices import parse_azure_prices
from ballast_lab.prices.logs.folder import parse_aws_prices, read_market
from ballast_lab.prices.logs.gcp_prices import parse_gcp_prices
from ballast_localcluster.errors import NodesFileError
from ballast_operator.allocator.saved_state import decode as read_saved_state
from ballast_operator.api.read import (
    InvalidObject,
    read_cluster_policy,
    read_job_status,
    read_training_job,
)
from ballast_operator.cli.allocate.command import read_problem
from ballast_operator.cli.local.up import read_nodes
from ballast_operator.cli.plan import input as plan_input
from ballast_operator.cli.simulate.input import read_amounts, window_of
from ballast_operator.desired import pod_object
from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.views.lease import LeaseReader
from ballast_operator.views.nodes import foreign_use, read_node
from ballast_operator.views.pod import read_pod
from ballast_operator.views.spec import read_spec
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Ack, Proposal, Report, TerminationMessage, read_finished_step
from ballast_policies.contract.plan import Plan
from ballast_policies.gpus.catalogue import CatalogueError, gpu_of_node, parse_gpus
from ballast_policies.planning.profile import read_profile
from ballast_policies.prices.clouds import (
    AwsSpotPrice,
    AzurePrice,
    GcpPrice,
    gpu_price,
    read_skus,
    retail_price,
    spot_price,
)
from ballast_policies.prices.feed import FeedPrice, read_feed
from ballast_policies.prices.offers import PriceLogError, parse_catalogue
from ballast_policies.simulator.elastic_file import read_workload
from ballast_policies.simulator.workloads import WorkloadError, parse_trace
from ballast_policies.throughput.table import ThroughputError, parse_gavel
from ballast_trainer.checkpoints.folder_lock import Owner
from ballast_trainer.checkpoints.index import _read_index
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.cli.config_file import read_config
from ballast_trainer.config import read_job_config
from ballast_trainer.errors import CheckpointError, ConfigurationError
from ballast_trainer.replay import read_loads

from tests.contract.examples import EXAMPLES
from tests.fuzz import seeds
from tests.fuzz.mutation import Choose, as_json, mutated, mutated_within_schema
from tests.fuzz.parser import (
    Parser,
    attempt,
    compressed,
    document,
    joined,
    lines,
    message,
    object_with,
    read_file,
    text,
)
from tests.operator.steps.contexts import PODS, a_running_view


def _build_pod(job: Any) -> object:
    """The pod of a template that was read; one that cannot be used is refused when it is read."""
    spec, problem = read_spec(job)
    if spec is None:
        assert problem
        return None
    view = dataclasses.replace(a_running_view(), spec=spec)
    allocation = view.status.allocation
    assert allocation is not None
    pod = pod_object(
        view,
        spec,
        allocation.with_pods(dict(zip(PODS, "abcd", strict=True))),
        number=0,
        pod=PODS[0],
        gpu_resource="nvidia.com/gpu",
    )
    assert pinned_node(pod) == "a"
    return pod


def _read_lease(annotations: Any) -> object:
    """Never fails: what cannot be read is named in ``refused``."""
    lease = {"metadata": {"uid": "1", "resourceVersion": "1", "annotations": annotations}}
    return LeaseReader().read(lease, now=1.0)


def _annotations(choose: Choose) -> dict[str, str]:
    made = {name: as_json(mutated(value, choose), choose) for name, value in seeds.ANNOTATIONS.items()}
    return mutated_within_schema(made, choose)


def _template(choose: Choose) -> dict[str, Any]:
    spec = {**seeds.JOB["spec"], "template": mutated(seeds.TEMPLATE, choose)}
    return {**seeds.JOB, "spec": spec}


def _read_pods(pod: Any) -> object:
    return read_pod(pod, node_ready=True), pinned_node(pod), foreign_use([pod], "nvidia.com/gpu")


def _read_nodes(node: Any) -> object:
    return read_node(node).gpus("nvidia.com/gpu")


SKU = "0000-AAAA-0001"


def _read_status(found: object) -> object:
    """What a status says about the gang is asked by every loop, whatever it says."""
    status = read_job_status(found)
    if status.allocation is not None:
        gang = status.allocation
        assert gang.placement is not None
        assert gang.by_pool is not None
        assert gang.on_nodes_by_pool is not None
    return status


def _read_aws(rows: object) -> float:
    wanted = AwsSpotPrice(region="us-east-1", instance_type="p2.xlarge")
    price = spot_price(rows if isinstance(rows, list) else [rows], wanted)
    assert price > 0
    return price


def _read_azure(content: str) -> float:
    price = retail_price(content, AzurePrice(region="eastus2", vm_size=seeds.VM_SIZE, spot=True))
    assert price > 0
    return price


def _read_gcp(content: str) -> float:
    page = read_skus(content, [SKU], currency="USD")
    return gpu_price(page.prices, GcpPrice(skus=((SKU, 2.0),)))


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
            (Path(folder) / "aws.json").write_text(json.dumps(seeds.AWS_PRICES))
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


PARSERS = (
    message("report", Report),
    message("proposal", Proposal),
    message("ack", Ack),
    message("plan", Plan),
    message("termination_message", TerminationMessage),
    Parser(
        name="finished-step",
        make=lambda choose: str(mutated("10", choose)),
        read=read_finished_step,
        errors=(ContractError,),
    ),
    Parser(name="lease", make=_annotations, read=_read_lease),
    Parser(
        name="training-job",
        make=object_with(seeds.JOB, "spec"),
        read=read_training_job,
        errors=(InvalidObject,),
    ),
    Parser(name="pod-template", make=_template, read=_build_pod),
    Parser(
        name="cluster-policy",
        make=object_with(seeds.POLICY, "spec"),
        read=read_cluster_policy,
        errors=(InvalidObject,),
    ),
    Parser(
        name="job-status",
        make=object_with({"status": seeds.STATUS}, "status"),
        read=_read_status,
        errors=(ValueError,),
    ),
    Parser(
        name="job-config",
        make=document(EXAMPLES["config"].to_dict()),
        read=JobConfig.from_mapping,
        errors=(ContractError,),
    ),
    Parser(
        name="trainer-config",
        make=document(EXAMPLES["config"].to_dict()),
        read=read_job_config,
        errors=(ConfigurationError,),
    ),
    Parser(name="profile", make=document(seeds.PROFILE), read=read_profile, errors=(ContractError,)),
    Parser(
        name="cluster-file",
        make=text(seeds.CLUSTER),
        read=read_file(plan_input.read_cluster),
        errors=(click.ClickException,),
    ),
    Parser(name="allocate-input", make=text(seeds.PROBLEM), read=read_problem, errors=(ProblemError,)),
    Parser(
        name="trace",
        make=lines(seeds.TRACE, "\t"),
        read=lambda text: parse_trace(text, name="trace"),
        errors=(WorkloadError,),
    ),
    Parser(
        name="gavel-throughputs",
        make=lambda choose: as_json(mutated(seeds.GAVEL, choose), choose).encode(errors="surrogatepass"),
        read=lambda data: parse_gavel(data, source="file"),
        errors=(ThroughputError,),
    ),
    Parser(
        name="prices",
        make=joined(["v100=2.5", "p100=1", "k80=0.5"], ","),
        read=lambda text: read_amounts(text, "--prices", float),
        errors=(click.UsageError,),
    ),
    Parser(
        name="aws-prices",
        make=text(seeds.AWS_PRICES),
        read=lambda text: list(parse_aws_prices(text, source="file")),
        errors=(PriceLogError,),
    ),
    Parser(
        name="azure-prices",
        make=lines(seeds.AZURE_PRICES, ","),
        read=lambda text: list(parse_azure_prices(text, region="us_east", source="file")),
        errors=(PriceLogError,),
    ),
    Parser(
        name="gcp-prices",
        make=lines(seeds.GCP_PRICES, ", "),
        read=lambda text: list(parse_gcp_prices(text, start=0.0, source="file")),
        errors=(PriceLogError,),
    ),
    Parser(
        name="availability",
        make=lines(seeds.AVAILABILITY, " "),
        read=lambda text: parse_availability(text, source="file"),
        errors=(PriceLogError,),
    ),
    Parser(
        name="instances",
        make=lines(seeds.INSTANCES, ","),
        read=lambda text: parse_catalogue(text, source="file"),
        errors=(PriceLogError,),
    ),
    Parser(
        name="window",
        make=joined(["4000", "5000"], ":"),
        read=window_of,
        errors=(click.UsageError,),
    ),
    Parser(
        name="saved-state", make=compressed(seeds.SAVED_STATE), read=read_saved_state, errors=(ValueError,)
    ),
    Parser(name="node", make=lambda choose: mutated_within_schema(seeds.NODE, choose), read=_read_nodes),
    Parser(name="pod", make=lambda choose: mutated_within_schema(seeds.POD, choose), read=_read_pods),
    Parser(
        name="script-job",
        make=object_with(seeds.SCRIPT, "spec"),
        read=read_training_job,
        errors=(InvalidObject,),
    ),
    Parser(
        name="aws-answer",
        make=document(seeds.AWS_ROWS),
        read=_read_aws,
        errors=(PriceLogError,),
    ),
    Parser(name="azure-answer", make=text(seeds.AZURE_PAGE), read=_read_azure, errors=(PriceLogError,)),
    Parser(name="gcp-answer", make=text(seeds.gcp_page(SKU)), read=_read_gcp, errors=(PriceLogError,)),
    Parser(
        name="elastic-workload",
        make=text(seeds.ELASTIC_FILE),
        read=lambda content: read_workload(content, sizes="all"),
        errors=(ContractError,),
    ),
    Parser(name="price-feed", make=text(seeds.PRICE), read=_read_price),
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
        errors=(NodesFileError, click.ClickException),
    ),
    Parser(name="manifest", make=text(seeds.MANIFEST), read=Manifest.from_json, errors=(ValueError,)),
    Parser(name="checkpoint-index", make=_index, read=_read_a_checkpoints_index, errors=(CheckpointError,)),
    Parser(name="folder-owner", make=text(seeds.OWNER), read=read_file(_meet_owner)),
)

BY_NAME = {parser.name: parser for parser in PARSERS}

__all__ = ["BY_NAME", "PARSERS", "Parser", "attempt"]
