"""Noise has its distribution, is the same on every device, and gives exact samples."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch", reason="the noise is computed in torch")
pytest.importorskip("triton", reason="the kernel is written in Triton")


from histospec.client.vllm.coupled import noise  # noqa: E402
from histospec.client.vllm.coupled.alternatives import words  # noqa: E402
from histospec.client.vllm.coupled.places import WORD, Texts  # noqa: E402
from histospec.protocol.alternatives import (  # noqa: E402
    HIGHEST,
    LEAST,
    LEVELS_PER_NAT,
    MOST,
    groups_of,
    joined,
    unpack,
)

CHECK = Path(__file__).with_name("coupled_kernel_check.py")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the Random123 library
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox(counter: list[int], key: list[int], words: str) -> None:
    found = noise.philox(*([torch.tensor([word]) for word in numbers] for numbers in (counter, key)))
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_gumbel_is_minus_log_of_minus_log() -> None:
    ends = torch.arange(2000)
    words = torch.cat([ends, 2**32 - 1 - ends, 2**30 - 1000 + ends, torch.randint(2**32, (10**6,))])
    u = (words.numpy().astype(np.float64) + 0.5) / 2**32
    true = -np.log(-np.log1p(-u))
    assert np.abs(noise.gumbel(words).numpy() - true).max() < 1.5e-6


@pytest.mark.parametrize(
    ("seed", "before", "last", "times", "tokens", "bits"),
    [  # native/tests/noise_test.cc has the same table
        (0, -1, -1, 0, [0, 1, 255, 256], "3ed0dc70 3f1f7b1d 408c3adb be81af39"),
        (1, 5, 7, 0, [3, 511, 512, 1023], "bdac3b4f 3fa5604c 3fafd6d9 3fb4a0d0"),
        (-1, 2**31 - 1, 0, 3, [1024, 1280, 151935, 7], "4006e441 3f9bd528 3f97fd8d 3f8f32d8"),
        (2**62 + 12345, 40, 41, 1000, [767, 768, 2047, 50000], "bdc9ad2f 4008f39d bfa4b57d 3e250c52"),
        (-(2**63), 9, 9, 2**32 - 1, [1, 2, 3, 4], "3ed2454f 3c31c3fd bf6a03b3 400d66d7"),
    ],
)
def test_noise_of_known_places(seed: int, before: int, last: int, times: int, tokens: list[int], bits: str) -> None:
    seeds, pairs, counts = (torch.tensor([number]) for number in (seed, before << 32 | last & WORD, times))
    found = noise.noise(seeds, pairs, counts, max(tokens) + 1)[0, tokens]
    assert " ".join(f"{int(value) & WORD:08x}" for value in found.view(torch.int32)) == bits


@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 1024, 3000])
def test_noise_is_of_seed_place_and_token_alone(vocabulary: int) -> None:
    where = torch.tensor([[3, 3, 4, -3, 3], [9, 10, 9, 2**40, 9], [0, 0, 0, 0, 1]])
    whole = noise.noise(where[0], where[1], where[2], 3000)
    assert torch.equal(noise.noise(where[0], where[1], where[2], vocabulary), whole[:, :vocabulary])
    assert torch.equal(noise.noise(where[0, 2:], where[1, 2:], where[2, 2:], vocabulary), whole[2:, :vocabulary])
    assert len(whole.unique()) > 0.999 * whole.numel()


def test_noise_is_gumbel_over_seeds_places_and_tokens() -> None:
    """Kolmogorov and Smirnov; correlations of neighbours."""
    for varied in range(3):
        where = torch.zeros(3, 10_000, dtype=torch.int64)
        where[varied] = torch.arange(10_000)
        values = noise.noise(where[0], where[1], where[2], 18).numpy()
        assert stats.kstest(values[:, 17], "gumbel_r").pvalue > 1e-6
        for one, other in [(values[:-1, 3], values[1:, 3]), (values[:, 3], values[:, 4])]:
            assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(len(one)) < 5


def test_choices_are_samples() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf"), -4.0]])
    count = 50_000
    same = torch.zeros(count, dtype=torch.int64)
    chosen = noise.choose(logits, same, torch.arange(count), same, same)
    expected = logits.softmax(-1)[0].double().numpy() * count
    found = np.bincount(chosen, minlength=6)
    assert found[4] == 0
    assert stats.chisquare(np.delete(found, 4), np.delete(expected, 4), sum_check=False).pvalue > 1e-6


def test_twins_agree_as_often_as_promised() -> None:
    """At least (1 - TV) / (1 + TV), and far more often than independent draws."""
    torch.manual_seed(0)
    old = torch.randn(1, 50) * 2
    new = old + 0.2 * torch.randn(1, 50)
    p, q = old.softmax(-1)[0], new.softmax(-1)[0]
    distance = (p - q).abs().sum().item() / 2
    rows, seeds = torch.zeros(5000, dtype=torch.int64), torch.arange(5000)
    where = (rows, seeds, rows, rows)
    agree = (noise.choose(old, *where) == noise.choose(new, *where)).double().mean().item()
    assert agree > (1 - distance) / (1 + distance) - 0.02
    assert agree > (p * q).sum().item() + 0.2


def naive_places(text: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
    """Of the draws [first, last]: counted by looking at all of the text each time."""
    padded = [-1, -1, *text]
    pairs = [(padded[i], padded[i + 1]) for i in range(last + 1)]  # pairs[i]: before token i
    places = [(pairs[i], sum(pairs[j] == pairs[i] for j in range(i))) for i in range(first, last + 1)]
    return [before << 32 | after & WORD for (before, after), _ in places], [times for _, times in places]


def test_places_are_those_of_the_whole_text() -> None:
    """Of texts that grow by what survives of their drafts, stop for a while, and are set back."""
    rng = np.random.default_rng(0)
    texts = Texts()
    rows = {name: rng.integers(0, 3, 400).astype(np.int32) for name in ("a", "b", "c")}
    known = dict.fromkeys(rows, 1)
    for _ in range(150):
        running = [name for name in rows if rng.random() < 0.8]
        drafted = [int(rng.integers(0, 6)) for _ in running]
        found = texts.places((n, rows[n], known[n], d) for n, d in zip(running, drafted, strict=True))
        for name, count, places in zip(running, drafted, found, strict=True):
            assert tuple(places) == naive_places(rows[name].tolist(), known[name], known[name] + count)
            known[name] += int(rng.integers(0, count + 2))
            if rng.random() < 0.05:
                known[name] = max(1, known[name] - 7)
            rows[name][known[name] :] = rng.integers(0, 3, 400 - known[name])  # what was drafted did not come
    assert min(known.values()) > 50


def test_no_place_comes_twice_in_a_text() -> None:
    text = np.tile(np.arange(3, dtype=np.int32), 50)
    (places,) = Texts().places([("a", text, 1, 149)])
    assert len(set(zip(*places, strict=True))) == 150


def check(what: str, **environment: str) -> Any:
    done = subprocess.run([sys.executable, CHECK, what], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_chooses_alike() -> None:
    """Run by Triton's interpreter, operation by operation."""
    result = check("choices", TRITON_INTERPRET="1")
    assert result["rows"] == result["alike"] > 40
    assert result["noise"] == result["alike noise"] > 4000


def test_the_kernel_finds_the_same_alternatives() -> None:
    """Run by Triton's interpreter; also where several of the most probable tokens belong to one lane."""
    result = check("alternatives", TRITON_INTERPRET="1")
    assert result["rows"] == result["alike"] > 60
    assert result["some"] > 30


@pytest.mark.v1
def test_the_kernel_compiles_and_rounds_as_the_cpu_does() -> None:
    """For an H100, without one. A fused multiply-add rounds once where the CPU rounds twice."""
    kinds = check("ptx")
    assert kinds.pop("fma", 0) == 0
    assert set(kinds) == {"add.rn", "mul.rn", "sub.rn"}
    assert check("weighing_ptx").get("fma", 0) == 0


def test_alternatives_are_the_most_probable_other_tokens() -> None:
    """Against probabilities in float64, sorted; and packed as the protocol's plain writer packs them."""
    torch.manual_seed(0)
    logits = torch.randn(400, 60) * torch.linspace(0.1, 6, 400)[:, None]
    logits[::7, ::2] = float("-inf")
    rows, zero = torch.arange(400), torch.zeros(400, dtype=torch.int64)
    weighed = noise.weigh(logits, rows, rows, zero, zero)
    assert torch.equal(weighed.tokens, noise.choose(logits, rows, rows, zero, zero))
    table = words(weighed).numpy()
    counts, groups = groups_of(table[:, 0].astype(np.uint8), table[:, 1:].astype(np.uint32))
    places = unpack(joined(counts, groups), 400)
    probabilities = logits.double().softmax(-1).numpy()
    compared = 0
    for p, token, place in zip(probabilities, weighed.tokens.tolist(), places, strict=True):
        likely = [other for other in np.argsort(-p).tolist() if other != token and p[other] >= LEAST][:MOST]
        if not likely:
            assert place is None
            continue
        assert place is not None
        assert [other for other, _ in place.others] == likely
        found = [place.sampled, *(kept for _, kept in place.others)]
        expected = p[[token, *likely]]
        near = np.abs(np.log(found) - np.log(expected)) <= 0.5 / LEVELS_PER_NAT + 1e-5
        assert (near | (expected < np.exp(-HIGHEST / LEVELS_PER_NAT))).all()
        compared += 1
    assert 100 < compared < 400  # some rows have none
