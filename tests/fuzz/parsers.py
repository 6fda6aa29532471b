"""Every parser of what a pod, a user, a file or an older operator has written, with its documented errors."""

import dataclasses
from typing import Any

import click
from ballast_lab.prices.logs.availability_log import parse_availability
from ballast_lab.prices.logs.azure_prices import parse_azure_prices
from ballast_lab.prices.logs.folder import parse_aws_prices
from ballast_lab.prices.logs.gcp_prices import parse_gcp_prices
from ballast_operator.allocator.saved_state import decode as read_saved_state
from ballast_operator.api.read import (
    InvalidObject,
    read_cluster_policy,
    read_job_status,
    read_training_job,
)
from ballast_operator.cli.allocate.command import read_problem
from ballast_operator.cli.plan import input as plan_input
from ballast_operator.cli.simulate.input import read_amounts, window_of
from ballast_operator.desired.pod import pod_object
from ballast_operator.kube.slim import pinned_node
from ballast_operator.views.lease import LeaseReader
from ballast_operator.views.nodes import foreign_use, read_node
from ballast_operator.views.pod import read_pod
from ballast_operator.views.spec import read_spec
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.contract import (
    Ack,
    ContractError,
    Plan,
    Proposal,
    Report,
    TerminationMessage,
)
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import read_finished_step
from ballast_policies.planning.profile import read_profile
from ballast_policies.prices.offers import PriceLogError, parse_catalogue
from ballast_policies.simulator.workloads.trace import parse_trace
from ballast_policies.simulator.workloads.workload import WorkloadError
from ballast_policies.throughput.gavel_file import parse_gavel
from ballast_policies.throughput.table import ThroughputError
from ballast_trainer.config import read_job_config
from ballast_trainer.errors import ConfigurationError

from tests.contract.examples import EXAMPLES
from tests.fuzz import seeds
from tests.fuzz.file_parsers import FILE_PARSERS
from tests.fuzz.money_parsers import MONEY_PARSERS
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
        read=read_job_status,
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
    *FILE_PARSERS,
    *MONEY_PARSERS,
)

BY_NAME = {parser.name: parser for parser in PARSERS}

__all__ = ["BY_NAME", "PARSERS", "Parser", "attempt"]
