"""Gumbel noise as a pure function of (seed, place, token), with the same bits on every device.

argmax(logits + noise) is an exact sample of softmax(logits) (E. J. Gumbel, 1954; C. J. Maddison et al., "A* Sampling",
NeurIPS 2014), and the same noise gives the same choice wherever the logits are nearly the same. Therefore nothing here
may depend on the device. Bits come from Philox4x32-10 (J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011). The logarithms are polynomials (S. L. Moshier's Cephes, logf), whose operations IEEE 754 rounds alike on
every device. kernel.py does the same operations in the same order on GPUs; change both together.

A counter gives four words. Of 1,024 tokens, words 0 belong to the first 256, words 1 to the next 256, and so on, so
that a GPU reads adjacent logits.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from histospec.client.vllm.coupled.alternatives import Weighed
from histospec.client.vllm.coupled.places import WORD
from histospec.protocol.alternatives import MOST

if TYPE_CHECKING:  # type checkers would take minutes for torch
    torch: Any
    pad: Any
    Tensor = Any
else:
    import torch
    from torch import Tensor
    from torch.nn.functional import pad

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

QUARTER = 256  # counters of a tile; it has four times as many tokens

# log(1 + f) = f - f²/2 + f³ * polynomial(f), the highest power first.
POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2_LOW, LN2_HIGH = -2.12194440e-4, 0.693359375  # their sum is ln 2
HALF_ROOT = 0.707106781186547524
NEAR_ONE = 0.25  # below, 1 - u has lost digits of u

CHUNK = 1 << 22  # how many numbers a temporary tensor has


def choose(logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor) -> Tensor:
    """Returns the coupled samples: argmax(logits[row] + noise(seed, place)); of equal tokens the first.

    Args:
        logits: float32[any, V]; -inf is never chosen.
        rows: int64[n], rows of the logits.
        seeds: int64[n]; all 64 bits count.
        pairs: int64[n], the pairs of the places, see places.py.
        times: int64[n], their counts; 32 bits count.

    Returns:
        int64[n], the tokens.
    """
    return torch.cat([(part + drawn).argmax(dim=-1) for part, drawn in _parts(logits, rows, seeds, pairs, times)])


def weigh(logits: Tensor, rows: Tensor, seeds: Tensor, pairs: Tensor, times: Tensor) -> Weighed:
    """Returns the samples of `choose`, with the most probable tokens of their rows."""
    found = [weighed(part, drawn) for part, drawn in _parts(logits, rows, seeds, pairs, times)]
    return Weighed(*(torch.cat(each) for each in zip(*found, strict=True)))


def weighed(logits: Tensor, drawn: Tensor) -> Weighed:
    """Returns the samples with this noise, float32[n, V], and the most probable tokens of their rows."""
    tokens = (logits + drawn).argmax(dim=-1)
    most = min(MOST + 1, logits.shape[1])
    missing = MOST + 1 - most
    likely, which = (
        pad(each, (0, missing), value=fill) for each, fill in zip(logits.topk(most), (float("-inf"), 0), strict=True)
    )
    return Weighed(tokens, logits.gather(1, tokens[:, None])[:, 0], likely, which, logits.logsumexp(1))


def _parts(logits: Tensor, rows: Tensor, *place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the logits of some rows, and their noise."""
    vocabulary = logits.shape[1]
    chunk = max(1, CHUNK // vocabulary)
    for r, s, p, t in zip(*(each.split(chunk) for each in (rows, *place)), strict=True):
        yield logits[r], noise(s, p, t, vocabulary)


def noise(seeds: Tensor, pairs: Tensor, times: Tensor, vocabulary: int) -> Tensor:
    """Returns standard Gumbel noise, float32[n, vocabulary], for int64[n] seeds and places."""
    tiles = -(-vocabulary // (4 * QUARTER))
    counters = torch.arange(min(vocabulary, tiles * QUARTER), device=seeds.device)
    seeds, pairs, times = seeds[:, None], pairs[:, None], times[:, None]
    words = philox(
        (counters[None], pairs & WORD, (pairs >> 32) & WORD, times & WORD),
        (seeds & WORD, (seeds >> 32) & WORD),
    )
    if vocabulary <= QUARTER:
        return gumbel(words[0])
    laid = torch.stack([word.view(-1, tiles, QUARTER) for word in words], dim=2)
    return gumbel(laid.view(len(seeds), -1)[:, :vocabulary])


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Returns the four words of Philox4x32-10 for a counter of four words and a key of two; int64 in [0, 2^32)."""
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]  # modulo 2^64; the sign is an ordinary bit
        c = [
            ((second >> 32) & WORD) ^ c[1] ^ k[0],
            second & WORD,
            ((first >> 32) & WORD) ^ c[3] ^ k[1],
            first & WORD,
        ]
        k = [(k[0] + WEYL[0]) & WORD, (k[1] + WEYL[1]) & WORD]
    return c


def gumbel(words: Tensor) -> Tensor:
    """Returns -log(-log(1 - u)) as float32, with u = (word + 1/2) / 2^32; values lie between -3.2 and 22.9."""
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    rest = ((WORD - words).to(torch.float32) + 0.5) * 2.0**-32  # 1 - u
    near = u < NEAR_ONE
    f, exponent = _split(rest)
    exponential = -_log(torch.where(near, -u, f), torch.where(near, torch.zeros_like(exponent), exponent))
    return -_log(*_split(exponential))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (f, exponent) with x = (1 + f) * 2^exponent and 1 + f between the square roots of 1/2 and 2."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    small = mantissa < HALF_ROOT
    f = torch.where(small, mantissa + mantissa, mantissa) - 1.0
    return f, torch.where(small, exponent - 1, exponent).to(torch.float32)


def _log(f: Tensor, exponent: Tensor) -> Tensor:
    square = f * f
    y = torch.full_like(f, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        y = y * f + coefficient
    y = y * f * square
    y = y + exponent * LN2_LOW
    y = y - 0.5 * square
    return f + y + exponent * LN2_HIGH
