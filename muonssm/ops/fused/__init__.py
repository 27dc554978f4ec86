"""Fused parts of a training step on a CPU: norms with gates, unit vectors, SwiGLU, cross-entropy of linear logits.

Each module computes the same formula in torch's own operations where its kernel cannot run: on other devices, without
the compiled library, and under compilation, export and torch.func, which cannot see into the kernels.
"""
