"""The task: `a + b - c` in three-digit numbers, worked out column by column, with an answer that can be checked.

A solution is plain English of 100-170 tokens. Its wording is free: the warm start shows several wordings. The reward
depends only on the number after the last word `answer`.
"""

import random
from dataclasses import dataclass

PLACES = ("ones", "tens", "hundreds", "thousands")
OPENINGS = ("first", "now", "next", "then", "so", "ok", "look at", "we see")
EQUALS = ("=", "is", "makes", "gives")
WRITES = ("write", "put", "keep", "the digit is")
CARRIES = ("carry 1", "and carry 1", "with 1 over", "so 1 goes on")
BORROWS = ("borrow 1", "and borrow 1", "so take 1 more", "we owe 1")
RESULTS = ("we have", "this leaves", "together", "that is")
ENDINGS = ("so the answer", "the answer", "answer", "done , answer")

START, END = "<problem>", "<end>"


def _vocabulary() -> list[str]:
    phrases = (*PLACES, *OPENINGS, *EQUALS, *WRITES, *CARRIES, *BORROWS, *RESULTS, *ENDINGS, "add subtract to from")
    words = sorted({word for phrase in phrases for word in phrase.split()} - set("0123456789="))
    return [START, END, *"0123456789", *"+-=.,:", *(w for w in words if w not in "+-=.,:")]


VOCABULARY = _vocabulary()
IDS = {word: i for i, word in enumerate(VOCABULARY)}
END_ID = IDS[END]
LONGEST = 240
"""The most tokens of a response; the worked solutions of the warm start stay below 170."""


def encode(text: str) -> list[int]:
    """Returns the token ids of words separated by blanks; numbers are written digit by digit ("3 4 7")."""
    return [IDS[word] for word in text.split()]


def decode(tokens: list[int]) -> str:
    """Returns the words of token ids, separated by blanks."""
    return " ".join(VOCABULARY[t] for t in tokens)


def digits(number: int) -> str:
    """Returns a number as the policy reads it: 347 -> "3 4 7"."""
    return " ".join(str(number))


@dataclass(frozen=True)
class Problem:
    """`a + b - c`, never negative."""

    a: int
    b: int
    c: int

    @property
    def answer(self) -> int:
        """The number that the response must end with."""
        return self.a + self.b - self.c

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return encode(f"{START} {digits(self.a)} + {digits(self.b)} - {digits(self.c)} :")

    def reward(self, response: list[int]) -> float:
        """Returns 1.0 if the response ends with the end token after the right answer, else 0.0."""
        return float(decode(response).endswith(f" answer {digits(self.answer)} {END}"))


def problems(count: int, rng: random.Random) -> list[Problem]:
    """Returns `count` different problems with three-digit numbers."""
    found: dict[Problem, None] = {}
    while len(found) < count:
        found[Problem(rng.randrange(100, 1000), rng.randrange(100, 1000), rng.randrange(100, 1000))] = None
        found = {p: None for p in found if p.answer >= 0}
    return list(found)


def worked_solution(problem: Problem, rng: random.Random, slips: float = 0.0) -> list[int]:
    """Returns the token ids of one solution with random wording.

    It forgets each carry or borrow with probability `slips`. Everything after a slip follows from it, so the answer is
    wrong.
    """
    adding, total = _columns(problem.a, problem.b, "+", rng, slips)
    subtracting, answer = _columns(total, problem.c, "-", rng, slips)
    text = [
        f"add {digits(problem.b)} to {digits(problem.a)} :",
        *adding,
        f"{rng.choice(RESULTS)} {digits(total)} .",
        f"subtract {digits(problem.c)} from {digits(total)} :",
        *subtracting,
        f"{rng.choice(ENDINGS)} {digits(answer)} {END}",
    ]
    return encode(" ".join(text))


def _columns(x: int, y: int, sign: str, rng: random.Random, slips: float) -> tuple[list[str], int]:
    """Returns one sentence per column, from the ones upward (value, digit to write, carry, borrow), and the result."""
    sentences, result, over = [], 0, 0
    places = max(len(str(x)), len(str(y)))
    for place in range(places):
        p, q = x // 10**place % 10, y // 10**place % 10
        value = p + q + over if sign == "+" else p - q - over
        left = f"{q} + {p}" if sign == "+" and rng.random() < 0.3 else f"{p} {sign} {q}"
        left += f" {sign} 1" if over else ""
        shown = digits(value) if value >= 0 else f"- {digits(-value)}"
        over = int((value > 9 or value < 0) and rng.random() >= slips)
        going = f" {rng.choice(CARRIES if sign == '+' else BORROWS)}" if over else ""
        sentences.append(
            f"{rng.choice(OPENINGS)} {PLACES[place]} : {left} {rng.choice(EQUALS)} {shown} , "
            f"{rng.choice(WRITES)} {value % 10}{going} ."
        )
        result += value % 10 * 10**place
    return sentences, result + (over * 10**places if sign == "+" else 0)
