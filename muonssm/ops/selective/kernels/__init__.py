"""The diagonal recurrence as Triton kernels: what each computes, and why.

    a_t = exp(dt_t A), or 1 - dt_t B_t^2       w_t = c_t dt_t x_t B_t^T        y_t = S_t C_t
    M_t = gamma_t M_{t-1} + w_t                S_t = a_t * S_{t-1} + M_t

    T steps of all sequences, D channels, N states per channel
    x, dt, y [T, D];  B, C [T, N];  A [D, N];  gamma [T] or [1];  c (`scale`) [T];  S, M [sequences, D, N]

A program owns a tile `[BLOCK_D, BLOCK_N]` of channels and states of a sequence (or of a piece of it) and processes its
steps with S and M in registers: inputs are read once, and states leave the chip at checkpoints only. Per step and
channel these are 6 bytes in bfloat16 for 16 exponentials and 80 other operations (N = 16). An H100 could move twice the
bytes; its exponential units are the limit. A parallel scan over steps would compute every exponential at least twice,
so it is used only if sequences times blocks of channels cannot fill the device: `fwd_pieces.py` then computes the state
before each piece of a sequence first.

    write_scale.py   c_t, whose norm is taken over all channels and so needs its own pass; and its gradient
    fwd_scan.py      y and the last states; for a backward pass also the states before every 64 steps
    bwd_scan.py      recomputes 64 steps from their checkpoint, then runs the adjoint recurrence backward
    fwd_pieces.py    the states before pieces of a sequence, and their adjoints
    step.py          one decoding step of every sequence

Gradients of B, C, c and gamma are sums over channels. Each program stores a partial sum, and `write_scale.py` adds them
in a fixed order, so that results do not vary from run to run, as they would with atomic adds.
"""
