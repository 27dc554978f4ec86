"""The Triton kernels of `muon_memory`. `ops/memory/triton.py` launches them; docs/design/gpu.md describes them."""
