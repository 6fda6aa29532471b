"""Elements that travel in PTD parallelism, per microbatch (dissertation 4.3.2 and 4.4.1).

b samples of s tokens and hidden size h; multiply by the bytes of an element.
"""


def pipeline_elements(microbatch_size: int, sequence: int, hidden: int) -> int:
    """Elements between two stages, one direction: b s h."""
    return microbatch_size * sequence * hidden


def scattered_pipeline_elements(
    microbatch_size: int, sequence: int, hidden: int, tensor_parallel: int
) -> float:
    """The same with scatter/gather: b s h / t between each pair of ranks, then an all-gather."""
    return pipeline_elements(microbatch_size, sequence, hidden) / tensor_parallel


def tensor_parallel_elements(
    microbatch_size: int, sequence: int, hidden: int, tensor_parallel: int, layers: int = 1
) -> float:
    """Elements per rank of a stage of ``layers`` layers: 8 b s h (t - 1) / t each.

    Two all-reduces forward and two backward of b s h elements; a ring moves 2 (t - 1) / t of them.
    """
    t = tensor_parallel
    return layers * 8 * pipeline_elements(microbatch_size, sequence, hidden) * (t - 1) / t


def data_parallel_elements(parameters: float, data_parallel: int) -> float:
    """Elements per rank and batch: a ring all-reduce of its gradients, 2 (d - 1) / d of them (4.3.3)."""
    return 2 * (data_parallel - 1) / data_parallel * parameters
