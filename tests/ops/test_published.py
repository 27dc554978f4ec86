"""Plain backbones equal the published recurrences in transformers' own code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from muonssm.ops import Muon, muon_memory, muon_selective_scan

from .cases import IMPLS, TOLERANCE, Case, all_combinations, difference, make_inputs


@all_combinations(
    impl=IMPLS,
    peer=["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"],
    alpha=["gated_deltanet", "deltanet"],
)
def test_gated_deltanet_and_deltanet_are_transformers_gated_delta_rule(impl, peer, alpha):
    i = make_inputs(Case(lengths=(70, 70), d=8, m=8, gamma="float"), torch.float32)
    q, k = (F.normalize(i[name], dim=-1) for name in "qk")
    log_alpha = torch.zeros_like(i["log_alpha"]) if alpha == "deltanet" else i["log_alpha"]
    wanted, state = getattr(qwen3_next, peer)(
        q, k, i["v"], g=log_alpha, beta=i["beta"], initial_state=i["S"].mT.contiguous(), output_final_state=True
    )
    y, end = muon_memory(
        q * k.shape[-1] ** -0.5, k, i["v"], log_alpha, i["beta"], muon=Muon.off(), state=(i["S"], i["M"]), impl=impl
    )
    assert difference(y, wanted) < TOLERANCE[torch.float32]
    assert difference(end.S, state.mT) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
def test_mamba_is_transformers_sequential_scan(impl):
    """Compute transformers' MambaMixer (its sequential path) with our scan instead of its loop."""
    torch.manual_seed(0)
    config = mamba.MambaConfig(hidden_size=12, state_size=5, expand=2, conv_kernel=4, time_step_rank=3)
    mixer = mamba.MambaMixer(config, layer_idx=0).eval()
    hidden = torch.randn(2, 33, 12)
    with torch.no_grad():
        wanted = mixer(hidden)
        x, z = mixer.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        x = mixer.act(mixer.conv1d(x)[..., :33]).transpose(1, 2)
        dt, B, C = mixer.x_proj(x).split([3, 5, 5], dim=-1)
        dt = F.softplus(mixer.dt_proj(dt))
        y, _ = muon_selective_scan(x, dt, -torch.exp(mixer.A_log), B, C, muon=Muon.off(), impl=impl)
        found = mixer.out_proj((y + x * mixer.D) * mixer.act(z.transpose(1, 2)))
    assert difference(found, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
def test_mamba_as_a_memory_is_the_selective_scan_with_one_gate_a_head(impl):
    """Table 1's Mamba (alpha_t, beta 1, eta 0): the two operators agree where their gates coincide."""
    generator = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(2, 40, n, generator=generator, dtype=torch.float64) for n in (6, 4, 4))
    dt = torch.rand(2, 40, 1, generator=generator, dtype=torch.float64)
    A = torch.full((6, 4), -0.7, dtype=torch.float64)
    wanted, end = muon_selective_scan(x, dt.expand(2, 40, 6), A, B, C, impl="reference")
    v = (dt * x)[:, :, None]
    y, state = muon_memory(C[:, :, None], B[:, :, None], v, -0.7 * dt, torch.ones_like(dt), eta=0.0, impl=impl)
    assert difference(y[:, :, 0], wanted) < TOLERANCE[torch.float64]
    assert difference(state.S[:, 0], end.S) < TOLERANCE[torch.float64]
