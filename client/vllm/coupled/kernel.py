# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles these functions and gives their arguments their types.
"""noise.choose on GPUs: one pass over the logits, without writing the noise to memory.

It does the operations of noise.py in the same order and without fused multiply-adds, so that both give the same bits.
It reads every byte of the logits once, and writes no tensor of their size. `weigh` finds the most probable tokens of a
row in the same pass.
"""

from typing import TYPE_CHECKING, Any

from histospec.client.vllm.coupled import noise
from histospec.client.vllm.coupled.alternatives import Weighed
from histospec.client.vllm.coupled.places import WORD as WORD_MASK
from histospec.protocol.alternatives import MOST

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
LIKELY = tl.constexpr(MOST + 1)
LEAST_REFERENCE = tl.constexpr(-1e30)
HALF_ROOT, NEAR_ONE = tl.constexpr(noise.HALF_ROOT), tl.constexpr(noise.NEAR_ONE)


def choose(logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor) -> Tensor:
    """See noise.choose; all tensors are on one GPU."""
    return _launch(logits, rows, seeds, pairs, times, likely=0)[0]


def weigh(logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor) -> Weighed:
    """See noise.weigh; all tensors are on one GPU."""
    tokens, likely, which, most, total = _launch(logits, rows, seeds, pairs, times, likely=MOST + 1)
    likely, at = likely.flatten(1).topk(MOST + 1)
    reference = most.amax(1, keepdim=True)
    total = reference[:, 0] + (total * (most - reference).exp()).sum(1).log()
    return Weighed(tokens, logits[rows, tokens], likely, which.flatten(1).gather(1, at), total)


def _launch(
    logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor, likely: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the tokens; and of each row and split its largest logits, their tokens, a reference, and exp summed."""
    vocabulary, count = logits.shape[1], len(rows)
    tiles = -(-vocabulary // (4 * noise.QUARTER))
    splits = max(1, min(tiles, PROGRAMS // max(count, 1)))
    best = torch.empty(count, splits, dtype=torch.float32, device=logits.device)
    token = torch.empty(count, splits, dtype=torch.int64, device=logits.device)
    top = torch.empty(count, splits, likely, dtype=torch.float32, device=logits.device)
    which = torch.empty(count, splits, likely, dtype=torch.int64, device=logits.device)
    most, total = torch.empty(2, count, splits, dtype=torch.float32, device=logits.device)
    if count:
        _choose[(count, splits)](
            logits, logits.stride(0), rows, seeds, pairs, times, best, token, top, which, most, total, vocabulary,
            tiles, splits, quarter=noise.QUARTER, likely=likely, enable_fp_fusion=False,
        )  # fmt: skip
    # Each split has its first best token. Of equal ones, take the first over all splits.
    chosen = torch.where(best == best.amax(1, keepdim=True), token, vocabulary).amin(1).clamp(max=vocabulary - 1)
    return chosen, top, which, most, total


@triton.jit
def _choose(
    logits, stride, rows, seeds, pairs, times, best, token, top, which, most_of, total, vocabulary, tiles, splits,
    quarter: tl.constexpr, likely: tl.constexpr,
):  # fmt: skip
    """A program handles one row, and every `splits`-th of its tiles."""
    number, split = tl.program_id(0), tl.program_id(1)
    row = logits + tl.load(rows + number) * stride
    seed, pair, again = tl.load(seeds + number), tl.load(pairs + number), tl.load(times + number)
    lane = tl.arange(0, quarter)
    lane_best = tl.full([quarter], float("-inf"), tl.float32)
    lane_token = tl.full([quarter], 0, tl.int32)
    if likely > 0:
        nothing = tl.full([quarter], float("-inf"), tl.float32)
        zero = tl.full([quarter], 0, tl.int32)
        v0, v1, v2, v3, t0, t1, t2, t3 = nothing, nothing, nothing, nothing, zero, zero, zero, zero
        reference = tl.full([quarter], LEAST_REFERENCE, tl.float32)
        summed = tl.full([quarter], 0.0, tl.float32)
    for tile in range(split, tiles, splits):
        word_0, word_1, word_2, word_3 = _philox(tile * quarter + lane, pair, again, seed)
        at = tile * 4 * quarter + lane
        lane_best, lane_token = _better(row, at, word_0, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + quarter, word_1, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + 2 * quarter, word_2, vocabulary, lane_best, lane_token)
        lane_best, lane_token = _better(row, at + 3 * quarter, word_3, vocabulary, lane_best, lane_token)
        if likely > 0:
            for part in tl.static_range(4):
                here = at + part * quarter
                value = tl.load(row + here, mask=here < vocabulary, other=float("-inf"))
                higher = tl.maximum(reference, value)
                summed = summed * tl.exp(reference - higher) + tl.exp(value - higher)
                reference = higher
                over_0, over_1, over_2, over_3 = value > v0, value > v1, value > v2, value > v3
                v3, t3 = (
                    tl.where(over_2, v2, tl.where(over_3, value, v3)),
                    tl.where(over_2, t2, tl.where(over_3, here, t3)),
                )
                v2, t2 = (
                    tl.where(over_1, v1, tl.where(over_2, value, v2)),
                    tl.where(over_1, t1, tl.where(over_2, here, t2)),
                )
                v1, t1 = (
                    tl.where(over_0, v0, tl.where(over_1, value, v1)),
                    tl.where(over_0, t0, tl.where(over_1, here, t1)),
                )
                v0, t0 = tl.where(over_0, value, v0), tl.where(over_0, here, t0)
    most = tl.max(lane_best, axis=0)
    first = tl.min(tl.where(lane_best == most, lane_token, vocabulary), axis=0)
    tl.store(best + number * splits + split, most)
    tl.store(token + number * splits + split, first.to(tl.int64))
    if likely > 0:
        highest = tl.max(reference, axis=0)
        tl.store(most_of + number * splits + split, highest)
        tl.store(total + number * splits + split, tl.sum(summed * tl.exp(reference - highest), axis=0))
        for i in tl.static_range(likely):
            value = tl.max(v0, axis=0)
            taken = tl.min(tl.where(v0 == value, t0, vocabulary), axis=0)
            tl.store(top + (number * splits + split) * likely + i, value)
            tl.store(which + (number * splits + split) * likely + i, taken.to(tl.int64))
            gone = (v0 == value) & (t0 == taken)
            v0, t0 = tl.where(gone, v1, v0), tl.where(gone, t1, t0)
            v1, t1 = tl.where(gone, v2, v1), tl.where(gone, t2, t1)
            v2, t2 = tl.where(gone, v3, v2), tl.where(gone, t3, t2)
            v3 = tl.where(gone, float("-inf"), v3)


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
