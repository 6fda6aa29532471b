"""Configurations of small jobs."""


def small_job(model, *, steps=2, microbatches=2, batch=4, **fields):
    """A job whose layers stay where they are.

    Args:
        model: its name, or all of the field; so is ``data`` among the fields.
        steps: of the job.
        microbatches: of a step.
        batch: samples of a step.
        fields: others of the configuration; of ``pipeline`` what it adds.
    """
    fields = {key: value for key, value in fields.items() if value is not None}
    named = {"model": model, **({"data": fields.pop("data")} if "data" in fields else {})}
    pipeline = {"microbatches": microbatches, "globalBatchSize": batch, **fields.pop("pipeline", {})}
    return {
        "totalSteps": steps,
        **{key: {"name": value} if isinstance(value, str) else value for key, value in named.items()},
        "pipeline": pipeline,
        "rebalance": {"enabled": False},
        **fields,
    }
