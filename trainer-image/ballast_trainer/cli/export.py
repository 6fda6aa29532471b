"""``ballast-train export``: a checkpoint's whole model in one file, or as a folder of Hugging Face's."""

from pathlib import Path

import click
from ballast_policies.contract.job.output import ExportFormat

from ballast_trainer.cli.config_file import ASSIGNMENTS, CONFIG, read_config


@click.command()
@CONFIG
@ASSIGNMENTS
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    default=None,
    help="Directory of checkpoints, of which the newest whole one counts, or one of them. "
    "Default: checkpoint.path.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write; of huggingFace a folder. What was there is replaced.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([str(kind) for kind in ExportFormat]),
    default=str(ExportFormat.SAFETENSORS),
    show_default=True,
    help="One file of safetensors or of torch.save, or a folder for from_pretrained.",
)
def export(
    config_path: Path, assignments: tuple[str, ...], checkpoint: Path | None, output: Path, kind: str
) -> None:
    """Write the whole model of a checkpoint, by parameter name."""
    from ballast_trainer.checkpoints.export import export_checkpoint
    from ballast_trainer.errors import ConfigurationError
    from ballast_trainer.launch import ValidatedJob

    job = ValidatedJob.from_mapping(read_config(config_path, assignments))
    folder = checkpoint or (Path(job.config.checkpoint.path) if job.config.checkpoint.path else None)
    if folder is None:
        reason = "missing, and checkpoint.path is not set. To fix: name the directory of checkpoints"
        raise ConfigurationError("--checkpoint", reason)
    step, count = export_checkpoint(job.config, job.model, folder, output, ExportFormat(kind))
    click.echo(f"step {step}: {count} tensors written to {output}")
