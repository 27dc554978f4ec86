"""The diagonal recurrence as Triton kernels: what each computes, why it is cut this way, and the letters they share.

    a_t = exp(dt_t A), or 1 - dt_t B_t^2       w_t = c_t dt_t x_t B_t^T        y_t = S_t C_t
    M_t = gamma_t M_{t-1} + w_t                S_t = a_t * S_{t-1} + M_t

    T steps of all sequences, D channels, N states of a channel
    x, dt, y [T, D];  B, C [T, N];  A [D, N];  gamma [T] or [1];  c (`scale`) [T];  S, M [sequences, D, N]

A program owns a tile `[BLOCK_D, BLOCK_N]` of channels and states of one sequence (or of a piece of it) and walks along
its steps with S and M in registers, so an input is read once and a state never leaves the chip between checkpoints.
Per step and channel that is 6 bytes in bfloat16 for 16 exponentials and 80 other operations (N = 16): an H100 has room
for the bytes twice over, and is bound by its exponential units. That decides the form: a parallel scan over steps would
compute every exponential at least twice. It is used where it has to be: where sequences times blocks of channels are
too few for the device, `pieces.py` first finds the state in which each piece of a sequence begins.

    write.py      c_t: the norm of a step's write goes over all channels, so it is a pass of its own; and its gradient
    forward.py    y and the last states; the states before every 64 steps where a backward pass will want them
    backward.py   every 64 steps again from their checkpoint, then the adjoint recurrence from the last step
    pieces.py     the states at which pieces of a sequence begin, and their adjoints
    step.py       one step of every sequence, for decoding

Gradients of B, C, c and gamma are sums over channels. Each program writes its part and `write.py` adds them in a fixed
order, so that results do not vary from run to run, as they would with atomic adds.
"""
