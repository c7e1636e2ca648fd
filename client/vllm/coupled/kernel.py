# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles these functions and gives their arguments their types.
"""noise.choose on GPUs: one pass over the logits, without writing the noise to memory.

It does the operations of noise.py in the same order and without fused multiply-adds, so that both give the same bits.
It reads every byte of the logits once, and writes no tensor of their size.
"""

from typing import TYPE_CHECKING, Any

from . import noise
from .places import WORD as WORD_MASK

if TYPE_CHECKING:  # type checkers would take minutes for torch
    torch: Any
    triton: Any
    tl: Any
    Tensor = Any
else:
    import torch
    import triton
    import triton.language as tl
    from torch import Tensor

PROGRAMS = 1024  # at least, if the vocabulary is large enough, so that a small batch also keeps a GPU busy

ROUNDS = tl.constexpr(noise.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(number) for number in noise.MULTIPLIERS)
WEYL_0, WEYL_1 = (tl.constexpr(number) for number in noise.WEYL)
WORD = tl.constexpr(WORD_MASK)
C0, C1, C2, C3, C4, C5, C6, C7, C8 = (tl.constexpr(number) for number in noise.POLYNOMIAL)
LN2_LOW, LN2_HIGH = tl.constexpr(noise.LN2_LOW), tl.constexpr(noise.LN2_HIGH)
HALF_ROOT, NEAR_ONE = tl.constexpr(noise.HALF_ROOT), tl.constexpr(noise.NEAR_ONE)


def choose(logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor) -> Tensor:
    """See noise.choose; all tensors are on one GPU."""
    vocabulary, count = logits.shape[1], len(rows)
    tiles = -(-vocabulary // (4 * noise.QUARTER))
    splits = max(1, min(tiles, PROGRAMS // max(count, 1)))
    best = torch.empty(count, splits, dtype=torch.float32, device=logits.device)
    token = torch.empty(count, splits, dtype=torch.int64, device=logits.device)
    if count:
        _choose[(count, splits)](
            logits, logits.stride(0), rows, seeds, pairs, times, best, token, vocabulary, tiles, splits,
            quarter=noise.QUARTER, enable_fp_fusion=False,
        )  # fmt: skip
    # Each split has its first best token. Of equal ones, take the first over all splits.
    return torch.where(best == best.amax(1, keepdim=True), token, vocabulary).amin(1).clamp(max=vocabulary - 1)


@triton.jit
def _choose(
    logits, stride, rows, seeds, pairs, times, best, token, vocabulary, tiles, splits, quarter: tl.constexpr
):  # fmt: skip
    """A program handles one row, and every `splits`-th of its tiles."""
    number, split = tl.program_id(0), tl.program_id(1)
    row = logits + tl.load(rows + number) * stride
    seed, pair, again = tl.load(seeds + number), tl.load(pairs + number), tl.load(times + number)
    lane = tl.arange(0, quarter)
    lane_best = tl.full([quarter], float("-inf"), tl.float32)
    lane_token = tl.full([quarter], 0, tl.int32)
    for tile in range(split, tiles, splits):
        word_0, word_1, word_2, word_3 = _philox(tile * quarter + lane, pair, again, seed)
        at = tile * 4 * quarter + lane
        lane_best, lane_token = _better(row, at, word_0, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + quarter, word_1, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + 2 * quarter, word_2, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + 3 * quarter, word_3, vocabulary, lane_best, lane_token)
    most = tl.max(lane_best, axis=0)
    first = tl.min(tl.where(lane_best == most, lane_token, vocabulary), axis=0)
    tl.store(best + number * splits + split, most)
    tl.store(token + number * splits + split, first.to(tl.int64))


@triton.jit
def _better(row, at, word, vocabulary, best, token):
    """Returns the better of the lane's token and the token `at`; if they are equal, the lane's, which comes first."""
    score = tl.load(row + at, mask=at < vocabulary, other=float("-inf")) + _gumbel(word)
    better = score > best
    return tl.where(better, score, best), tl.where(better, at, token)


@triton.jit
def _philox(counter, pair, again, seed):
    c0 = counter.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (pair & WORD).to(tl.uint32)
    c2 = tl.zeros_like(c0) + ((pair >> 32) & WORD).to(tl.uint32)
    c3 = tl.zeros_like(c0) + (again & WORD).to(tl.uint32)
    k0, k1 = (seed & WORD).to(tl.uint32), ((seed >> 32) & WORD).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        m0, m1 = tl.full([], MULTIPLIER_0, tl.uint32), tl.full([], MULTIPLIER_1, tl.uint32)
        high_0, high_1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        low_0, low_1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += tl.full([], WEYL_0, tl.uint32)
        k1 += tl.full([], WEYL_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word):
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    rest = ((word ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near = u < NEAR_ONE
    f, exponent = _split(rest)
    exponential = -_log(tl.where(near, -u, f), tl.where(near, 0.0, exponent))
    f, exponent = _split(exponential)
    return -_log(f, exponent)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = mantissa < HALF_ROOT
    f = tl.where(small, mantissa + mantissa, mantissa) - 1.0
    return f, tl.where(small, exponent - 1, exponent).to(tl.float32)


@triton.jit
def _log(f, exponent):
    square = f * f
    y = C0 * f + C1
    y = y * f + C2
    y = y * f + C3
    y = y * f + C4
    y = y * f + C5
    y = y * f + C6
    y = y * f + C7
    y = y * f + C8
    y = y * f * square
    y = y + exponent * LN2_LOW
    y = y - 0.5 * square
    return f + y + exponent * LN2_HIGH
