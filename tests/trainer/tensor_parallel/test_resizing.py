"""ZERO-resizing of one product: what is computed, what is imputed, and what it saves."""

import pytest
import torch
from ballast_trainer.tensor_parallel.product import ColumnSelection, GemmTimer, product
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.support.examples import examples

COLUMNS, ROWS = 24, 10


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(3, 5, COLUMNS, generator=generator, requires_grad=True)
    weight = torch.randn(ROWS, COLUMNS, generator=generator, requires_grad=True)
    bias = torch.randn(ROWS, generator=generator, requires_grad=True)
    return value, weight, bias, torch.randn(3, 5, ROWS, generator=generator)


def selection(kept, imputation="zero"):
    return ColumnSelection(columns=COLUMNS, kept=torch.tensor(kept), imputation=imputation)


def clock(running=False):
    made = GemmTimer(torch.device("cpu"))
    made.running = running
    return made


def gradients(inputs, output, gradient):
    return torch.autograd.grad(output, inputs, gradient)


@pytest.mark.parametrize("running", [False, True], ids=["untimed", "timed"])
def test_nothing_left_out_is_bit_identical(running):
    """Gamma = 0: output and all gradients are those of ``functional.linear``, also while timed."""
    value, weight, bias, gradient = tensors()
    plain = functional.linear(value, weight, bias)
    ours = product(value, weight, bias, selection=None, clock=clock(running))
    assert torch.equal(ours, plain)
    expected = gradients((value, weight, bias), plain, gradient)
    found = gradients((value, weight, bias), ours, gradient)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(st.sets(st.integers(0, COLUMNS - 1), min_size=1), st.integers(0, 99))
@examples(30)
def test_a_resized_product_is_the_masked_dense_one(kept, seed):
    """Output and gradients equal the dense layer's under a mask; columns left out are exactly 0."""
    kept = sorted(kept)
    value, weight, bias, gradient = (tensor.detach().double() for tensor in tensors(seed))
    for tensor in (value, weight, bias):
        tensor.requires_grad_()
    mask = torch.zeros(COLUMNS, dtype=torch.float64)
    mask[kept] = 1.0
    masked = functional.linear(value * mask, weight * mask, bias)
    ours = product(value, weight, bias, selection=selection(kept), clock=clock())
    torch.testing.assert_close(ours, masked, atol=1e-12, rtol=1e-12)
    expected = gradients((value, weight, bias), masked, gradient)
    found = gradients((value, weight, bias), ours, gradient)
    for ours_, dense in zip(found, expected, strict=True):
        assert ours_.shape == dense.shape
        torch.testing.assert_close(ours_, dense, atol=1e-12, rtol=1e-12)
    left_out = [column for column in range(COLUMNS) if column not in kept]
    assert (found[0][..., left_out] == 0).all()
    assert (found[1][:, left_out] == 0).all()


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_arithmetic_falls_by_gamma(ratio):
    """Counted operations of forward and backward are (1 - gamma) of the whole product's."""
    counts = {}
    for name, kept in (("whole", None), ("resized", range(round(COLUMNS * (1 - ratio))))):
        value, weight, bias, gradient = tensors()
        with FlopCounterMode(display=False) as counter:
            made = selection(list(kept)) if kept is not None else None
            product(value, weight, bias, selection=made, clock=clock(True)).backward(gradient)
        counts[name] = counter.get_total_flops()
    assert counts["resized"] == pytest.approx((1 - ratio) * counts["whole"], rel=1e-9)


def test_imputation_by_the_average():
    """A column left out gets the mean of the gradients that were computed in its row."""
    value, weight, bias, gradient = tensors()
    kept = [0, 3, 7]
    ours = product(value, weight, bias, selection=selection(kept, "average"), clock=clock())
    of_input, of_weight = gradients((value, weight), ours, gradient)
    for found in (of_input, of_weight):
        mean = found[..., kept].mean(-1)
        torch.testing.assert_close(found[..., 5], mean)
        torch.testing.assert_close(found[..., 23], mean)


def test_imputation_by_the_same_as_last_time():
    """A column left out gets the gradient it had when it was last computed."""
    value, weight, bias, gradient = tensors()
    made = selection(list(range(COLUMNS)), "same")
    whole = gradients((value, weight), product(value, weight, bias, selection=made, clock=clock()), gradient)
    made.kept = torch.tensor([1, 2])
    again = product(value, weight, bias, selection=made, clock=clock())
    found = gradients((value, weight), again, 2 * gradient)
    for before, after in zip(whole, found, strict=True):
        torch.testing.assert_close(after[..., [1, 2]], 2 * before[..., [1, 2]])
        assert torch.equal(after[..., 3:], before[..., 3:])


def test_before_there_is_anything_to_repeat_zero_is_imputed():
    """By the same as last time, in the first step."""
    value, weight, bias, gradient = tensors()
    ours = product(value, weight, bias, selection=selection([4], "same"), clock=clock())
    (of_weight,) = gradients((weight,), ours, gradient)
    assert of_weight.abs().sum(0).count_nonzero() == 1
