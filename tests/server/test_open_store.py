"""Which store is opened, and with which limits."""

from contextlib import closing
from pathlib import Path

import pytest
import redis

from histospec.server.errors import StoreFull
from histospec.server.machine import free_bytes
from histospec.server.open_store import open_store
from histospec.server.settings.config import Config
from histospec.server.stores.redis.servers import comes_back
from tests.support.batches import batch
from tests.support.disks import small_disk

SMALL = 2 << 20


def test_a_volume_has_the_room_that_its_file_system_says(tmp_path: Path) -> None:
    with small_disk(tmp_path / "data") as directory:
        assert free_bytes(directory) == SMALL
        assert free_bytes(directory / "not" / "made") == SMALL
        (directory / "of others").write_bytes(bytes(SMALL // 2))
        assert free_bytes(directory) == SMALL // 2


def test_a_limit_that_nobody_gave_leaves_out_what_others_have_and_stays_as_the_file_grows(tmp_path: Path) -> None:
    with small_disk(tmp_path / "data", 12 << 20) as directory:
        (directory / "of others").write_bytes(bytes(8 << 20))
        with closing(open_store(Config(data_dir=directory), "me")) as store:
            assert store.size.limit == 3 << 20
            for number in range(20):
                store.append(batch(bytes(100_000), prompt=number.to_bytes(4, "little"))).result(60)
        with closing(open_store(Config(data_dir=directory), "me")) as store:
            assert store.size.limit == 3 << 20


def test_the_file_may_fill_nine_tenths_of_the_free_space_unless_told(tmp_path: Path) -> None:
    """The write-ahead log and other files have the rest of the volume."""
    with small_disk(tmp_path / "data") as directory:
        for given, limit in ((None, 1 << 20), (3 << 20, 3 << 20), (0, None)):
            with closing(open_store(Config(data_dir=directory, disk=given), "me")) as store:
                assert store.size.limit == limit


def test_the_limit_that_nobody_gave_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("histospec.server.open_store.free_bytes", lambda _: 4 << 20)
    with closing(open_store(Config(data_dir=tmp_path), "me")) as store:
        writes = [store.append(batch(bytes(100_000), prompt=number.to_bytes(4, "little"))) for number in range(100)]
        errors = [error for write in writes if (error := write.exception(60))]
        assert 60 < len(errors) < 75
        assert all(isinstance(error, StoreFull) for error in errors)
        assert "the file has reached its limit (--disk 3MiB)" in str(errors[-1])


@pytest.mark.parametrize(
    ("error", "same_url", "other_url"),
    [
        (redis.ConnectionError("Connection refused"), True, True),
        (redis.ConnectionError("Name or service not known"), True, True),
        (redis.TimeoutError("Timeout reading from socket"), True, True),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), True, True),
        (redis.exceptions.ClusterDownError("The cluster is down"), True, True),
        (redis.AuthenticationError("invalid username-password pair"), False, True),
        (redis.exceptions.NoPermissionError("this user has no permissions"), False, True),
        (redis.ResponseError("DB index is out of range"), False, False),
        (ValueError("a bug"), False, False),
    ],
)
def test_what_may_come_back_is_tried_again(error: Exception, same_url: bool, other_url: bool) -> None:
    assert (comes_back(error, False), comes_back(error, True)) == (same_url, other_url)
