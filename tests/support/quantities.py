"""Sizes as Kubernetes and the server parse them, computed exactly."""

from fractions import Fraction

from pydantic import ByteSize, TypeAdapter

# What each suffix multiplies by, as Kubernetes documents its quantities.
SUFFIXES: dict[str, Fraction | int] = {
    "": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def size(text: object) -> int:
    """A size as the server reads it."""
    return int(TypeAdapter(ByteSize).validate_python(text))


def exact(quantity: str) -> Fraction:
    """A quantity as Kubernetes reads it."""
    number = quantity.rstrip("kmKMGTPEi")
    return Fraction(number) * SUFFIXES[quantity[len(number) :]]
