"""Shared by the chunk kernels: gates and decays of a chunk, the triangular inverse, and memory layouts.

A program processes one chunk of C steps of one head. Sequences, packed or rows of a batch, follow each other in
`[steps, H, ...]`; `chunks [n, 2]` has the first step and the length of every chunk. Intermediate tensors are
`[n, H, ...]`, zero in the rows beyond a chunk's length. One of them is `vectors [n, H, PLANES, C]` in float32, whose
planes are listed below.
"""

from __future__ import annotations

import triton
import triton.language as tl

C = tl.constexpr(64)
PLANES = tl.constexpr(21)

SCALE = tl.constexpr(0)  # c, the scale of the write: u = c v
A_ = tl.constexpr(1)  # A_t, the share of S0 in S_t without erase
G_ = tl.constexpr(2)  # g_t, the share of M0 in S_t
GAM = tl.constexpr(3)  # Gam_t, the share of M0 in M_t
LA_END = tl.constexpr(4)  # LA[last, s]
CM_END = tl.constexpr(5)  # Cm[last, s]
LG_END = tl.constexpr(6)  # LG[last, s]
ERASE_ = tl.constexpr(7)  # e_t = eta beta_t
NORM_K = tl.constexpr(8)
NORM_V = tl.constexpr(9)
BY_K = tl.constexpr(10)  # dk = by_k k and dv = by_v v, through the norms
BY_V = tl.constexpr(11)
D_BETA = tl.constexpr(12)  # gradient of beta through the scale of the write
D_LA_END = tl.constexpr(13)  # gradients of the above
D_CM_END = tl.constexpr(14)
D_LG_END = tl.constexpr(15)
D_ERASE = tl.constexpr(16)  # gradient of e through the products within the chunk
READ_S = tl.constexpr(17)  # q_t.(dY S0)_t, at the last step + <S0, dS1>
READ_M = tl.constexpr(18)  # q_t.(dY M0)_t, at the last step + <M0, dS1>
KEEP_M = tl.constexpr(19)  # at the last step <M0, dM1>
RECALL_ = tl.constexpr(20)  # g_t - mu_t Gam_t, the share of M0 in alpha_t S_{t-1}
FORGET_S = NORM_K  # k_t.(R S0)_t; reuses the plane of norms that are no longer needed
FORGET_M = NORM_V  # k_t.(R M0)_t


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Compute a b, multiplied in type OPERAND and summed in float32."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def chunk_rows(chunks, chunk, h, H):
    """Return the rows of the chunk's steps in `[steps H]`, which of them exist, the first step, and the last index."""
    start = tl.load(chunks + 2 * chunk).to(tl.int64)
    length = tl.load(chunks + 2 * chunk + 1)
    t = tl.arange(0, C)
    return (start + t) * H + h, t < length, start, length - 1


@triton.jit
def load_plane(vectors, base, plane):
    """Load one of the chunk's vectors; `base` counts chunks and heads."""
    return tl.load(vectors + (base * PLANES + plane) * C + tl.arange(0, C))


@triton.jit
def store_plane(vectors, base, plane, x):
    tl.store(vectors + (base * PLANES + plane) * C + tl.arange(0, C), x)


@triton.jit
def load_number(vectors, base, plane, t):
    """Load one entry of one of the chunk's vectors."""
    return tl.load(vectors + (base * PLANES + plane) * C + t)


@triton.jit
def load_rows(x, rows, live, first, width: tl.constexpr, B: tl.constexpr):
    """Load columns `first` to `first + B` of the rows `[steps H, width]`; zero where there are none."""
    column = first + tl.arange(0, B)
    return tl.load(
        x + rows[:, None] * width + column[None, :], mask=live[:, None] & (column < width)[None, :], other=0.0
    )


@triton.jit
def store_rows(x, rows, live, first, tile, width: tl.constexpr, B: tl.constexpr):
    """Store what `load_rows` loads; float16 saturates, as in `dtypes.widen`."""
    column = first + tl.arange(0, B)
    if x.dtype.element_ty == tl.float16:
        tile = tl.minimum(tl.maximum(tile, -65504.0), 65504.0)
    mask = live[:, None] & (column < width)[None, :]
    tl.store(x + rows[:, None] * width + column[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def tile_offsets(base, height: tl.constexpr, row, width: tl.constexpr, column):
    """Return offsets and mask of `[row, column]` in the matrix `[height, width]` number `base`."""
    offsets = base * (height * width) + row[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def load_tile(x, base, height: tl.constexpr, row, width: tl.constexpr, column):
    """Load a tile of matrix number `base`; zero beyond its edges."""
    offsets, mask = tile_offsets(base, height, row, width, column)
    return tl.load(x + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(x, base, height: tl.constexpr, row, width: tl.constexpr, column, tile):
    offsets, mask = tile_offsets(base, height, row, width, column)
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_tile_transposed(x, base, height: tl.constexpr, row, width: tl.constexpr, column):
    """Load the same tile transposed: `[column, row]`."""
    offsets = base * (height * width) + row[None, :] * width + column[:, None]
    return tl.load(x + offsets, mask=(row < height)[None, :] & (column < width)[:, None], other=0.0)


@triton.jit
def cumulate(log_a):
    """Compute cumulative logs as a pair of float32, and the number of zero gates so far.

    The sum is float64, so that a log of -100 does not cost the other gates digits. Gates below 1e-86, which are 0 in
    float32, are counted instead of summed, so that nothing is infinite.
    """
    zero = log_a < -200.0
    total = tl.cumsum(tl.where(zero, 0.0, log_a).to(tl.float64), axis=0)
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32), tl.cumsum(zero.to(tl.int32), axis=0)


@triton.jit
def decay_vector(log_a):
    """Compute a_t ... a_1 for every t."""
    high, _, zeros = cumulate(log_a)
    return tl.where(zeros == 0, tl.exp(high), 0.0)


@triton.jit
def decay_matrix(log_a):
    """Compute X[t, s] = a_t ... a_{s+1} for s <= t, else 0. Gates of 0 and 1 are exact, and nothing is divided."""
    high, low, zeros = cumulate(log_a)
    t = tl.arange(0, C)
    X = tl.exp(tl.minimum((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]), 0.0))
    return tl.where((t[:, None] >= t[None, :]) & (zeros[:, None] == zeros[None, :]), X, 0.0)


@triton.jit
def load_log_alpha(log_alpha, rows, live):
    """Load log_alpha; 0 where there is no step."""
    return tl.load(log_alpha + rows, mask=live, other=0.0)


@triton.jit
def load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head):
    """Load log(gamma) at steps t of the chunk; 0 where not `live`."""
    g = tl.load(gamma + (start + t) * gamma_step + h * gamma_head, mask=live, other=1.0)
    return tl.where(g > 0.0, tl.log(tl.where(g > 0.0, g, 1.0)), -1000.0)  # `cumulate` counts it as 0


@triton.jit
def load_mu(inject, rows, live, INJECT: tl.constexpr):
    """Load the gate mu; 1 without INJECT, and where there is no step."""
    if INJECT:  # noqa: SIM108  a branch at compile time
        mu = tl.load(inject + rows, mask=live, other=1.0)
    else:
        mu = tl.full((C,), 1.0, dtype=tl.float32)
    return mu


@triton.jit
def decays(log_alpha, log_gamma, mu, MOMENTUM: tl.constexpr, INJECT: tl.constexpr, PRECISION: tl.constexpr):
    """Compute LA, mu LG and Cm = LA diag(mu) LG of the chunk; without momentum LG is the identity."""
    LA = decay_matrix(log_alpha)
    if MOMENTUM:
        LG = decay_matrix(log_gamma)
        if INJECT:
            LG = mu[:, None] * LG
        Cm = tl.dot(LA, LG, input_precision=PRECISION)
    else:
        t = tl.arange(0, C)
        LG = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        Cm = LA
    return LA, LG, Cm


@triton.jit
def merge_blocks(T, N, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute inverses of diagonal blocks of twice the size from those of size SIZE.

    Two diagonal blocks with inverses X and Y, and Z below the first, have the inverse [[X, 0], [-Y Z X, Y]].
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    Z = tl.where((t // SIZE != s // SIZE) & (t // (2 * SIZE) == s // (2 * SIZE)), N, 0.0)
    return T - tl.dot(T, tl.dot(Z, T, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(N, PRECISION: tl.constexpr):
    """Compute (I + N)^-1 of a strictly lower N: 16 x 16 diagonal blocks by forward substitution, merged by products."""
    block = tl.arange(0, C // 16)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    D = tl.sum(tl.where(own, tl.reshape(N, (C // 16, 16, C // 16, 16)), 0.0), axis=2)
    i = tl.arange(0, 16)
    X = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(D)
    for n in range(1, 16):
        here = (i == n)[None, :, None]
        row = tl.sum(tl.where(here, D, 0.0), axis=1)
        X = tl.where(here, X - tl.sum(row[:, :, None] * X, axis=1)[:, None, :], X)
    T = tl.reshape(tl.where(own, X[:, :, None, :], 0.0), (C, C))
    return merge_blocks(merge_blocks(T, N, 16, PRECISION), N, 32, PRECISION)
