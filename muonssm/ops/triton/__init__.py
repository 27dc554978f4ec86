"""Code shared by the Triton kernels of both operators. `config` and `support` import without Triton."""
