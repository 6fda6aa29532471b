"""The trainer's reading of a job's configuration: the contract's checks, as ConfigurationError."""

from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.decode import Unknown, decode
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig

from ballast_trainer.errors import ConfigurationError


def read_job_config(value: Mapping[str, Any], *, unknown: Unknown = "refuse") -> JobConfig:
    """A configuration from parsed JSON or YAML, with the fields that its schedule determines filled in.

    Args:
        value: the configuration.
        unknown: treatment of fields that this release does not have: ``refuse`` in what users write,
            ``ignore`` in ``config.json`` of an operator that may be one release newer.

    Raises:
        ConfigurationError: fields are missing, unknown, of the wrong type or out of range; it names them all.
    """
    try:
        return decode(JobConfig, value, unknown=unknown).resolved()
    except ContractError as error:
        first, *others = error.problems
        reason = "\n".join([first.reason, *map(str, others)])
        raise ConfigurationError(first.path or "configuration", reason) from error
