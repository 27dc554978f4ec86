"""What training multiplies with: the precision, and the library of float32 matmuls."""

from __future__ import annotations

import pytest
import torch

from muonssm.lab.core import cpu, matmul, precision
from muonssm.lab.core.evaluate import score_split

ZEN_5 = {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": "fpu avx2 avx512f"}


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Pretend to be on a CPU, without a GPU."""

    def pretend(fields):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for module in (matmul, precision):
            monkeypatch.setattr(module, "cpu_fields", lambda: fields)

    monkeypatch.delenv(matmul.SETTING, raising=False)
    return pretend


def test_fields_of_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: A\nflags\t\t: fpu sse\n\nprocessor\t: 1\nvendor_id\t: B\n")
    assert cpu.cpu_fields(path) == {"processor": "0", "vendor_id": "A", "flags": "fpu sse"}
    assert cpu.cpu_fields(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("flags", "name"),
    [("fpu avx512f avx512_bf16", "bfloat16"), ("fpu amx_bf16", "bfloat16"), ("fpu avx512f", "float32")],
)
def test_auto_precision_follows_the_cpu(flags, name, on_a_cpu):
    on_a_cpu({"flags": flags})
    assert precision.choose_precision("auto").name == name
    assert precision.choose_precision("float32").name == "float32"


@pytest.mark.parametrize(
    ("change", "onednn"),
    [
        ({}, True),
        ({"cpu family": "25"}, False),
        ({"vendor_id": "GenuineIntel"}, False),
        ({"flags": "fpu avx2"}, False),
        ({"flags": ""}, False),
    ],
)
def test_the_cpu_decides(change, onednn, on_a_cpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(matmul, "_is_exact", lambda: True)
    on_a_cpu(ZEN_5 | change)
    assert matmul.choose_matmuls().onednn is onednn
    on_a_cpu({})
    assert not matmul.choose_matmuls().onednn


def test_rounded_products_are_refused(on_a_cpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    rounded = matmul._waves(64, 64).bfloat16().float()
    monkeypatch.setattr(matmul, "_waves", lambda *size: rounded + 1e-3)
    monkeypatch.setattr(matmul, "SIZES", ((64, 64, 64),))
    assert matmul._error(64, 64, 64) < matmul.TOLERANCE
    product = torch.Tensor.__matmul__
    coarse = lambda a, b: product(a.to(torch.bfloat16), b.to(torch.bfloat16)).to(a.dtype)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "__matmul__", lambda a, b: product(a, b) if a.dtype == torch.float64 else coarse(a, b)
        )
        assert matmul._error(64, 64, 64) > 10 * matmul.TOLERANCE
        matmul._is_exact.cache_clear()
        on_a_cpu(ZEN_5)
        assert not matmul.choose_matmuls().onednn
        monkeypatch.setenv(matmul.SETTING, "onednn")
        with pytest.raises(ValueError, match=matmul.SETTING):
            matmul.choose_matmuls()
    matmul._is_exact.cache_clear()


def test_the_user_decides(on_a_cpu, monkeypatch):
    on_a_cpu(ZEN_5)
    monkeypatch.setattr(matmul, "_is_exact", lambda: True)
    monkeypatch.setenv(matmul.SETTING, "torch")
    assert not matmul.choose_matmuls().onednn
    monkeypatch.setenv(matmul.SETTING, "onednn")
    assert matmul.choose_matmuls().onednn
    monkeypatch.setenv(matmul.SETTING, "mkl")
    with pytest.raises(ValueError, match=matmul.SETTING):
        matmul.choose_matmuls()


def test_the_setting_of_torch_returns(monkeypatch):
    monkeypatch.setattr(matmul, "choose_matmuls", lambda: matmul.Matmuls(True, ""))
    with matmul.fast_matmuls():
        assert torch.get_float32_matmul_precision() == "medium"
        with matmul.fast_matmuls():
            pass
        assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(KeyError), matmul.fast_matmuls():
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("high")
    try:
        with matmul.fast_matmuls():
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_scores_are_computed_with_the_matmuls_of_training(monkeypatch):
    """Otherwise `muonssm eval` would not print the scores of the run."""
    seen = []
    monkeypatch.setattr(matmul, "choose_matmuls", lambda: matmul.Matmuls(True, ""))

    class Task:
        def scorer(self, split):
            seen.append(torch.get_float32_matmul_precision())
            raise KeyError

    with pytest.raises(KeyError):
        score_split(Task(), torch.nn.Identity(), [], 1)
    assert seen == ["medium"]
