"""The kernels of `muon_memory`. docs/gpu.md says what each computes; `ops/memory/triton.py` launches them."""
