"""The epoch of a response, from the events of the engine's weights."""

import pytest

from histospec.client.engines.versions import WeightVersions


@pytest.mark.parametrize(
    ("version", "epoch"),
    [
        ("7", 7), ("step7", 7), ("global_step_40", 40), ("run-2/v007", 7), ("step 12", 12), ("0", 0),
        ("", None), ("best", None), ("9f86d08", None), ("v2.5", None), ("7b", None), ("step" + "9" * 19, None),
        ("9" * 40, None), (f"step{2**52}", 2**52), (f"step{2**52 + 1}", None), ("step\u0667", None),
    ],
)  # fmt: skip
def test_the_number_of_a_version(version: str, epoch: int | None) -> None:
    versions = WeightVersions()
    versions.name(version)
    assert versions.current == (epoch, 0)


def test_a_version_never_goes_back() -> None:
    versions = WeightVersions()
    seen = []
    for version in ("step4", "step4", "step9", "step5", "step10"):
        versions.name(version)
        seen.append(versions.current.epoch)
    assert seen == [4, 4, 9, 9, 10]


def test_numbers_are_not_believed_behind_names_without() -> None:
    """Some hashes end in a number, by chance."""
    versions = WeightVersions()
    for version, changes in (("9f86d08", 1), ("abcdef1", 2), ("abcdef1", 2), ("60303ae", 3)):
        versions.wrote()
        versions.name(version)
        assert versions.current == (None, changes)


def test_resets_count_only_where_nobody_names_versions() -> None:
    versions = WeightVersions()
    for _ in range(2):
        versions.wrote()
        versions.reset()
    versions.reset()
    assert versions.current == (None, 2)
    versions.name("step8")
    versions.wrote()
    versions.reset()
    assert versions.current == (8, 2)
