"""Matrix completion: what a job would do where it has not been seen, from what others did there.

Notation: M[i, j] with known entries K.  Model: M[i, j] = m + r_i + c_j + u_i . v_j with u, v of a small
rank.  Fitted by alternating least squares with a ridge penalty (lambda), as in Quasar and in the
throughput estimator of the dissertation (sections 5.3.3 and 5.6).  Rows without any known entry get
the column's typical value.
"""

import dataclasses

import numpy as np

SWEEPS = 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The whole matrix.

    Attributes:
        values: M, with the known entries as they were given.
        deviation: standard deviation of the unknown entries, from entries that were left out on purpose.
        mean: m of the model.
        right: (columns, 1 + rank) of the model: c_j and v_j.
        ridge: lambda.
    """

    values: np.ndarray
    deviation: float
    mean: float
    right: np.ndarray
    ridge: float

    def shifted(self, by: np.ndarray) -> "Completed":
        """With ``by`` (columns,) added to columns of which nothing is known."""
        right = self.right.copy()
        right[:, 0] += by
        return dataclasses.replace(self, values=self.values + by, right=right)

    def row(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        """(columns,) one row more, by the columns' factors as they were fitted without it.

        With many rows, one more hardly changes them, and a whole fit takes thousands of times as long.

        Args:
            values: (columns,) numbers; what is not known is not read.
            known: (columns,) bool.
        """
        rest = np.where(known, values - self.mean, 0.0)[None, :]
        left = _factors(rest - known * self.right[:, :1].T, known[None, :], self.right[:, 1:], self.ridge)
        fitted = self.mean + left[:, :1] + self.right[:, :1].T + left[:, 1:] @ self.right[:, 1:].T
        return np.where(known, values, fitted[0])


def complete(values: np.ndarray, known: np.ndarray, *, rank: int = 2, ridge: float = 0.1) -> Completed:
    """Fill in the entries of ``values`` that are not ``known``.

    Args:
        values: (rows, columns) numbers; what is not known is not read.
        known: (rows, columns) bool.
        rank: of the part beyond row and column effects.
        ridge: lambda, penalty on the factors; larger is smoother.

    Raises:
        ValueError: nothing is known, or a known entry is not finite.
    """
    if not known.any():
        raise ValueError("nothing is known of the matrix, so nothing can be said of the rest")
    if not np.isfinite(values[known]).all():
        raise ValueError("a known entry is not finite")
    fitted, mean, right = _fit(values, known, rank, ridge)
    return Completed(
        values=np.where(known, values, fitted),
        deviation=_deviation(values, known, rank, ridge),
        mean=mean,
        right=right,
        ridge=ridge,
    )


def _deviation(values: np.ndarray, known: np.ndarray, rank: int, ridge: float) -> float:
    """Root mean square error on each fifth of the known entries, predicted from the other four."""
    entries = np.argwhere(known)
    order = np.random.default_rng(0).permutation(len(entries))
    errors = []
    for fold in range(min(5, len(entries) - 1)):
        held = entries[order[fold::5]]
        rest = known.copy()
        rest[held[:, 0], held[:, 1]] = False
        if rest.any():
            fitted = _fit(values, rest, rank, ridge)[0]
            errors.append((fitted - values)[held[:, 0], held[:, 1]])
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else float("inf")


def _fit(
    values: np.ndarray, known: np.ndarray, rank: int, ridge: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """(the fitted matrix, m, the columns' effects and factors)."""
    mean = float(values[known].mean())
    rest = np.where(known, values - mean, 0.0)
    rank = min(rank, *values.shape)
    # First the effects alone; then the leading right factors of what they leave are the start of
    # the rest, so that the same matrix is always completed the same way.
    columns = np.zeros((values.shape[1], 1))
    rows = np.zeros((values.shape[0], 1))
    for _ in range(SWEEPS):
        rows = _factors(rest - known * columns.T, known, np.zeros((values.shape[1], 0)), ridge)
        columns = _factors((rest - known * rows).T, known.T, np.zeros((values.shape[0], 0)), ridge)
    left_over = rest - known * (rows + columns.T)
    right = np.hstack([columns, np.linalg.svd(left_over, full_matrices=False)[2][:rank].T])
    left = np.hstack([rows, np.zeros((values.shape[0], rank))])
    for _ in range(SWEEPS):
        left = _factors(rest - known * right[:, :1].T, known, right[:, 1:], ridge)
        right = _factors((rest - known * left[:, :1]).T, known.T, left[:, 1:], ridge)
    fitted: np.ndarray = mean + left[:, :1] + right[:, :1].T + left[:, 1:] @ right[:, 1:].T
    return fitted, mean, right


def _factors(rest: np.ndarray, known: np.ndarray, other: np.ndarray, ridge: float) -> np.ndarray:
    """For each row i the effect e and the factors u.

    They minimise sum_j (rest[i, j] - e - u . other_j)^2 + ridge (0.1 e^2 + |u|^2) over the known j.
    """
    wide = np.hstack([np.ones((len(other), 1)), other])
    penalty = ridge * np.diag([0.1] + [1.0] * other.shape[1])
    gram = np.einsum("ij,jk,jl->ikl", known.astype(float), wide, wide) + penalty
    found: np.ndarray = np.linalg.solve(gram, ((rest * known) @ wide)[:, :, None])[:, :, 0]
    return found
