"""Fused parts of a training step: each equals the formula in torch's operations, and its derivative."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from muonssm.ops.fused import cross_entropy, norms, support, swiglu

BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}  # relative, against float64
DTYPES = pytest.mark.parametrize("dtype", list(BOUND), ids=lambda dtype: str(dtype)[6:])
SIZES = pytest.mark.parametrize("size", [5, 36, 72, 128])


@pytest.fixture(autouse=True)
def kernels_for_small_tensors(monkeypatch):
    monkeypatch.setattr(support, "SMALL", 1)


def values_and_gradients(function, tensors):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    y = function(*tensors)
    weight = (
        torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype) if y.ndim else y.new_ones(())
    )
    return [y, *torch.autograd.grad(y, tensors, weight)]


def assert_equals_formula(function, tensors, monkeypatch):
    """Compare with the same function in float64 without kernels, which computes the formula."""
    assert support.has_kernel(tensors[0])
    actual = values_and_gradients(function, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(support, "SMALL", 1 << 60)
        expected = values_and_gradients(function, [x.double() for x in tensors])
    for found, wanted in zip(actual, expected, strict=True):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error <= BOUND[tensors[0].dtype]


def weights_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@DTYPES
@SIZES
def test_norms(dtype, size, monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 33, 2, size).to(dtype), torch.randn(size).to(weights_dtype(dtype))
    assert_equals_formula(lambda x, w: norms.rms_norm(x, w, 1e-5), [x, weight], monkeypatch)


def test_norms_of_float32_in_bfloat16():
    """What autocast makes of the result, without a pass of its own."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 33, 72), torch.randn(72)
    narrow = values_and_gradients(lambda x, w: norms.rms_norm(x, w, 1e-5, dtype=torch.bfloat16), [x, weight])
    wide = values_and_gradients(lambda x, w: norms.rms_norm(x, w, 1e-5).bfloat16(), [x, weight])
    assert narrow[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@DTYPES
@SIZES
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms_with_a_gate_in_wider_rows(dtype, size, gate_first, monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 33, 2, size).to(dtype), torch.randn(size).to(weights_dtype(dtype))
    rows = torch.randn(3, 33, 4 * size + 1).to(dtype)

    def gated(x, rows, weight):
        gate = rows[..., 1 : 1 + 2 * size].unflatten(2, (2, size))
        return norms.rms_norm(x, weight, 1e-5, gate, gate_first)

    assert_equals_formula(gated, [x, rows, weight], monkeypatch)


@DTYPES
@SIZES
def test_unit_vectors_of_a_slice(dtype, size, monkeypatch):
    torch.manual_seed(0)
    rows = torch.randn(3, 33, 4 * size + 1).to(dtype)
    assert_equals_formula(
        lambda rows: norms.unit(rows[..., size : 3 * size].unflatten(2, (2, size)), 0.3), [rows], monkeypatch
    )


def test_unit_vectors_are_finite_at_zero():
    x = torch.zeros(4, 33, 2, 20, requires_grad=True)
    y = norms.unit(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad.isfinite().all()


@DTYPES
def test_swiglu(dtype, monkeypatch):
    torch.manual_seed(0)
    shapes = ((3, 33, 24), (41, 24), (41, 24), (24, 41))
    assert_equals_formula(swiglu.swiglu, [torch.randn(*shape).to(dtype) for shape in shapes], monkeypatch)


def test_swiglu_keeps_two_products_for_the_backward_pass():
    x, weights = torch.randn(300, 24), [torch.randn(s, requires_grad=True) for s in ((41, 24), (41, 24), (24, 41))]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu.swiglu(x, *weights)
    assert sum(t.numel() for t in kept if t.shape[0] == 300) == 300 * (24 + 2 * 41)


@DTYPES
@pytest.mark.parametrize("vocabulary", [7, 1001])
def test_linear_cross_entropy_in_blocks(dtype, vocabulary, monkeypatch):
    monkeypatch.setattr(cross_entropy, "MOST_ROWS", 128)  # three blocks
    torch.manual_seed(0)
    h, weight = torch.randn(300, 24).to(dtype), torch.randn(vocabulary, 24).to(dtype)
    labels = torch.randint(vocabulary, (300,))
    labels[::7] = -100

    def loss(h, weight):
        return 0.5 * cross_entropy.linear_cross_entropy(h, weight, labels)

    assert_equals_formula(loss, [h, weight], monkeypatch)
    bound = 1e-3 if dtype == torch.bfloat16 else 1e-6
    expected = 0.5 * F.cross_entropy(h.double() @ weight.double().T, labels, reduction="sum")
    torch.testing.assert_close(loss(h, weight).double(), expected, rtol=bound, atol=0)


def test_linear_cross_entropy_without_gradients_labels_or_tokens():
    h, weight = torch.randn(40, 24), torch.randn(1001, 24, requires_grad=True)
    labels = torch.randint(1001, (40,))
    with torch.no_grad():
        without = cross_entropy.linear_cross_entropy(h, weight, labels)
    torch.testing.assert_close(without, cross_entropy.linear_cross_entropy(h, weight, labels).detach())
    for count in (0, 40):
        loss = cross_entropy.linear_cross_entropy(h[:count], weight, torch.full((count,), -100))
        (gradient,) = torch.autograd.grad(loss, weight)
        assert loss == 0
        assert torch.equal(gradient, torch.zeros_like(weight))


@pytest.mark.parametrize("label", [-1, 1001])
def test_labels_outside_of_the_vocabulary_are_refused(label):
    labels = torch.tensor([3, label, -100])
    with pytest.raises(IndexError, match=rf"labels must be in \[0, 1001\).*, got {label}"):
        cross_entropy.linear_cross_entropy(torch.randn(3, 24), torch.randn(1001, 24), labels)


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    from muonssm.lab.bench.measure import peak_bytes

    monkeypatch.setattr(cross_entropy, "BLOCK_NUMBERS", 128 * 4000)
    h, weight = torch.randn(2048, 16, requires_grad=True), torch.randn(4000, 16, requires_grad=True)
    labels = torch.randint(4000, (2048,))
    peak = peak_bytes(lambda: cross_entropy.linear_cross_entropy(h, weight, labels).backward())
    assert peak < 2048 * 4000 * 4 / 4


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    x, rows, weight = torch.randn(4, 250, 3, 72), torch.randn(4, 250, 500), torch.randn(72)
    h, head, labels = torch.randn(500, 24), torch.randn(1001, 24), torch.randint(1001, (500,))

    def everything():
        gate = rows[..., :216].unflatten(2, (3, 72))
        found = values_and_gradients(lambda x, w: norms.rms_norm(x, w, 1e-5, gate), [x, weight])
        return found + values_and_gradients(lambda h, w: cross_entropy.linear_cross_entropy(h, w, labels), [h, head])

    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(everything())
    torch.set_num_threads(before)
    for other in results[1:]:  # the matmuls are torch's; the norms' are ours
        assert all(torch.equal(a, b) for a, b in zip(results[0][:3], other[:3], strict=True))
        torch.testing.assert_close(other[3:], results[0][3:])


def test_compilers_see_torchs_operations():
    """A compiled function takes the formula, not the kernel, and gives the same numbers."""
    x, weight = torch.randn(3, 33, 2, 72), torch.randn(72)
    compiled = torch.compile(lambda x, w: norms.rms_norm(x, w, 1e-5), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), norms.rms_norm(x, weight, 1e-5))
