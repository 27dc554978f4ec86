"""What the chunk kernels share: gates and decays of a chunk, the triangular inverse, where things lie.

A program works on one chunk of C steps of one head. Sequences, packed or rows of a batch, lie one after the other in
`[steps, H, ...]`; `chunks [n, 2]` has every chunk's first step and its length. What kernels leave for each other lies
by chunk, `[n, H, ...]`, with its unfilled rows zero; among it, `vectors [n, H, PLANES, C]` in float32:
"""

from __future__ import annotations

import triton
import triton.language as tl

C = tl.constexpr(64)
PLANES = tl.constexpr(20)

SCALE = tl.constexpr(0)  # c, the scale of the write: u = c v
A_ = tl.constexpr(1)  # A_t, what is left of S0 in S_t without erase
G_ = tl.constexpr(2)  # g_t, what is left of M0 in S_t
GAM = tl.constexpr(3)  # Gam_t, what is left of M0 in M_t
LA_END = tl.constexpr(4)  # LA[last, s]
CM_END = tl.constexpr(5)  # Cm[last, s]
LG_END = tl.constexpr(6)  # LG[last, s]
ERASE_ = tl.constexpr(7)  # e_t = eta beta_t
NORM_K = tl.constexpr(8)
NORM_V = tl.constexpr(9)
BY_K = tl.constexpr(10)  # factors of k and v in their gradients, through the norms
BY_V = tl.constexpr(11)
D_BETA = tl.constexpr(12)  # what the write's scale contributes to the gradient of beta
D_LA_END = tl.constexpr(13)  # gradients of the above
D_CM_END = tl.constexpr(14)
D_LG_END = tl.constexpr(15)
D_ERASE = tl.constexpr(16)  # what the chunk's own products contribute to the gradient of e
READ_S = tl.constexpr(17)  # q_t.(dY S0)_t, at the last step + <S0, dS1>
READ_M = tl.constexpr(18)  # q_t.(dY M0)_t, at the last step + <M0, dS1>
KEEP_M = tl.constexpr(19)  # at the last step <M0, dM1>
FORGET_S = NORM_K  # k_t.(R S0)_t; the norms are not needed any more by then
FORGET_M = NORM_V  # k_t.(R M0)_t


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a b, multiplied in the operands' type and summed in float32."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def chunk_rows(chunks, chunk, h, H):
    """Row of every step of the chunk in `[steps H]`, whether it exists, the first step, and the last one's index."""
    start = tl.load(chunks + 2 * chunk).to(tl.int64)
    length = tl.load(chunks + 2 * chunk + 1)
    t = tl.arange(0, C)
    return (start + t) * H + h, t < length, start, length - 1


@triton.jit
def load_plane(vectors, base, plane):
    """One of the chunk's vectors; `base` counts chunks and heads."""
    return tl.load(vectors + (base * PLANES + plane) * C + tl.arange(0, C))


@triton.jit
def store_plane(vectors, base, plane, x):
    tl.store(vectors + (base * PLANES + plane) * C + tl.arange(0, C), x)


@triton.jit
def load_number(vectors, base, plane, t):
    """One entry of one of the chunk's vectors."""
    return tl.load(vectors + (base * PLANES + plane) * C + t)


@triton.jit
def load_rows(x, rows, live, first, width: tl.constexpr, B: tl.constexpr):
    """Columns `first` to `first + B` of the rows `[steps H, width]`, zero where there are none."""
    column = first + tl.arange(0, B)
    return tl.load(
        x + rows[:, None] * width + column[None, :], mask=live[:, None] & (column < width)[None, :], other=0.0
    )


@triton.jit
def store_rows(x, rows, live, first, tile, width: tl.constexpr, B: tl.constexpr):
    """The reverse of `load_rows`; what float16 cannot hold saturates, as in `dtypes.widen`."""
    column = first + tl.arange(0, B)
    if x.dtype.element_ty == tl.float16:
        tile = tl.minimum(tl.maximum(tile, -65504.0), 65504.0)
    mask = live[:, None] & (column < width)[None, :]
    tl.store(x + rows[:, None] * width + column[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def tile_offsets(base, height: tl.constexpr, row, width: tl.constexpr, column):
    """Offsets and mask of `[row, column]` in the matrix `[height, width]` number `base`."""
    offsets = base * (height * width) + row[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def load_tile(x, base, height: tl.constexpr, row, width: tl.constexpr, column):
    """A tile of matrix number `base`, zero beyond its edges."""
    offsets, mask = tile_offsets(base, height, row, width, column)
    return tl.load(x + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(x, base, height: tl.constexpr, row, width: tl.constexpr, column, tile):
    offsets, mask = tile_offsets(base, height, row, width, column)
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_tile_transposed(x, base, height: tl.constexpr, row, width: tl.constexpr, column):
    """The same tile with its columns first: `[column, row]`."""
    offsets = base * (height * width) + row[None, :] * width + column[:, None]
    return tl.load(x + offsets, mask=(row < height)[None, :] & (column < width)[:, None], other=0.0)


@triton.jit
def cumulate(log_a):
    """Cumulative logs as a float32 pair, and how many gates so far were 0: all that products of gates need.

    The sum is float64's, so that a -100 within a chunk costs the other gates no digits; gates below 1e-86, which are 0
    in float32, are counted instead, so that nothing is infinite.
    """
    zero = log_a < -200.0
    total = tl.cumsum(tl.where(zero, 0.0, log_a).to(tl.float64), axis=0)
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32), tl.cumsum(zero.to(tl.int32), axis=0)


@triton.jit
def decay_vector(log_a):
    """a_t ... a_1 for every t."""
    high, _, zeros = cumulate(log_a)
    return tl.where(zeros == 0, tl.exp(high), 0.0)


@triton.jit
def decay_matrix(log_a):
    """X[t, s] = a_t ... a_{s+1} for s <= t, else 0. Gates of exactly 0 and 1 are exact, and nothing is divided."""
    high, low, zeros = cumulate(log_a)
    t = tl.arange(0, C)
    X = tl.exp(tl.minimum((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]), 0.0))
    return tl.where((t[:, None] >= t[None, :]) & (zeros[:, None] == zeros[None, :]), X, 0.0)


@triton.jit
def load_log_alpha(log_alpha, rows, live):
    """Log of alpha, 0 where there is no step."""
    return tl.load(log_alpha + rows, mask=live, other=0.0)


@triton.jit
def load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head):
    """Log of gamma at steps t of the chunk, 0 where not `live`."""
    g = tl.load(gamma + (start + t) * gamma_step + h * gamma_head, mask=live, other=1.0)
    return tl.where(g > 0.0, tl.log(tl.where(g > 0.0, g, 1.0)), -1000.0)  # 0, to `cumulate`


@triton.jit
def decays(log_alpha, log_gamma, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr):
    """LA, LG and Cm = LA LG of the chunk; without momentum LG is the identity."""
    LA = decay_matrix(log_alpha)
    if MOMENTUM:
        LG = decay_matrix(log_gamma)
        Cm = tl.dot(LA, LG, input_precision=PRECISION)
    else:
        t = tl.arange(0, C)
        LG = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        Cm = LA
    return LA, LG, Cm


@triton.jit
def merge_blocks(T, N, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks twice as large, from those of size SIZE.

    Two blocks with inverses X, Y and Z below the first have [[X, 0], [-Y Z X, Y]] as their inverse.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    Z = tl.where((t // SIZE != s // SIZE) & (t // (2 * SIZE) == s // (2 * SIZE)), N, 0.0)
    return T - tl.dot(T, tl.dot(Z, T, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(N, PRECISION: tl.constexpr):
    """(I + N)^-1 of a strictly lower N: 16 x 16 diagonal blocks by forward substitution, then merged by products."""
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
