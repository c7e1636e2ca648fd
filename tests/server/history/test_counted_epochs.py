"""Workers that do not know the epoch count weight changes; the server turns the counts into one epoch."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.protocol.limits import MAX_EPOCH
from histospec.server.history.namespaces import FIRST_EPOCH
from histospec.server.rpc.specrl import PAUSE_SECONDS
from histospec.server.stores.interface import LAST_EPOCH
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.v1 import draft_pb2 as pb
from tests.support.batches import put
from tests.support.servers import Server, Starter
from tests.support.specrl_updater import Updater
from tests.support.wires import Connector, Wire

NUMBERS = itertools.count()


class Worker:
    """A stream that commits one response after the other."""

    def __init__(self, wire: Wire, namespace: str) -> None:
        self.wire = wire
        self.namespace = namespace
        self.stream = wire.stream()

    def commit(self, **fields: Any) -> int:
        """Returns the epoch of a response whose close has these fields."""
        wire, session = self.wire, next(NUMBERS)
        about: dict[str, Any] = {"namespace": self.namespace, "problem": f"problem-{session}"}
        self.stream.ask(opens=[wire.open(session, **about)], step=wire.step([session], [[1, 2]]))
        self.stream.ask(closes=[wire.commit(session, 2, **fields)])
        request = pb.HistoryRequest(prompt=wire.i32([1, 2, 3]), **about)
        [stored] = wire.stub.History(request).responses
        return stored.epoch


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A new namespace for each test."""
    return str(request.node.name)


@pytest.fixture
def wire(shared_server: Server, connect_shared: Connector) -> Wire:
    return connect_shared(shared_server.endpoint)


@pytest.fixture
def worker(wire: Wire, namespace: str) -> Callable[[], Worker]:
    """worker() returns a Worker with its own stream."""
    return lambda: Worker(wire, namespace)


def test_each_change_is_an_epoch(worker: Callable[[], Worker]) -> None:
    one = worker()
    assert [one.commit(changes=c) for c in (0, 0, 1, 1, 2, 5)] == [0, 0, 1, 1, 2, 5]


def test_workers_agree_whoever_changes_first(worker: Callable[[], Worker]) -> None:
    one, two = worker(), worker()
    assert [one.commit(changes=0), two.commit(changes=0)] == [0, 0]
    assert [one.commit(changes=1), two.commit(changes=1)] == [1, 1]
    assert [two.commit(changes=2), one.commit(changes=2)] == [2, 2]


def test_a_worker_that_starts_late_counts_from_where_the_others_are(worker: Callable[[], Worker]) -> None:
    early = worker()
    assert [early.commit(changes=c) for c in (0, 1, 2)] == [0, 1, 2]
    late = worker()
    assert late.commit(changes=0) == 2
    assert [early.commit(changes=3), late.commit(changes=1)] == [3, 3]


def test_a_worker_that_is_behind_drags_nobody_back(worker: Callable[[], Worker]) -> None:
    ahead, behind = worker(), worker()
    assert [ahead.commit(changes=0), behind.commit(changes=0)] == [0, 0]
    assert ahead.commit(changes=4) == 4
    assert behind.commit(changes=1) == 4


def test_a_connection_that_breaks_changes_nothing(worker: Callable[[], Worker]) -> None:
    assert [worker().commit(changes=c) for c in (7, 7, 7)] == [0, 0, 0]
    again = worker()
    assert [again.commit(changes=7), again.commit(changes=8)] == [0, 1]


@pytest.mark.parametrize("how", ["ingest", "commit"])
def test_epochs_that_somebody_names_beat_every_count(
    wire: Wire, worker: Callable[[], Worker], how: str, namespace: str
) -> None:
    """Counts do not run ahead of a trainer that names its epochs."""
    counting = worker()
    assert [counting.commit(changes=c) for c in (0, 1)] == [0, 1]
    if how == "ingest":
        wire.ingest([8], [[1, 2]], namespace, epoch=3)
    else:
        assert worker().commit(epoch=3, changes=99) == 3
    assert [counting.commit(changes=c) for c in (2, 9, 50)] == [3, 3, 3]
    wire.ingest([8], [[3, 4]], namespace, epoch=4)
    assert counting.commit(changes=51) == 4


def test_an_ingest_without_an_epoch_stops_no_count(wire: Wire, worker: Callable[[], Worker], namespace: str) -> None:
    counting = worker()
    assert counting.commit(changes=0) == 0
    wire.ingest([8], [[1, 2]], namespace)
    assert counting.commit(changes=1) == 1


def test_a_namespace_that_is_dropped_counts_anew(wire: Wire, worker: Callable[[], Worker], namespace: str) -> None:
    named = worker()
    assert named.commit(epoch=3) == 3
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace=namespace))
    counting = worker()
    assert [counting.commit(changes=c) for c in (5, 6)] == [0, 1]


def test_a_stream_that_goes_on_after_a_drop_counts_anew(
    wire: Wire, worker: Callable[[], Worker], namespace: str
) -> None:
    early = worker()
    assert [early.commit(changes=c) for c in (0, 7)] == [0, 7]
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace=namespace))
    assert [early.commit(changes=c) for c in (7, 8)] == [0, 1]


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 2**53, 2**63 - 1])
def test_an_epoch_that_leaves_no_room_to_count_is_refused(
    wire: Wire, worker: Callable[[], Worker], namespace: str, epoch: int
) -> None:
    """Any kind of request is refused, and changes nothing."""
    says = f"epoch: {epoch} is more than the limit of {MAX_EPOCH}"
    one = worker()
    calls: list[Callable[[], object]] = [
        lambda: wire.ingest([9], [[1]], namespace, epoch=epoch),
        lambda: wire.stub.Rewind(pb.RewindRequest(namespace=namespace, epoch=epoch)),
        lambda: one.commit(epoch=epoch),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError, match=says) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert worker().commit(changes=1) == 0


def test_there_is_room_to_count_from_the_largest_epoch_on(
    wire: Wire, worker: Callable[[], Worker], namespace: str
) -> None:
    wire.ingest([9], [[1]], namespace, epoch=FIRST_EPOCH)
    wire.ingest([9], [[2]], namespace)
    wire.stub.Rewind(pb.RewindRequest(namespace=namespace, epoch=FIRST_EPOCH))
    request = pb.HistoryRequest(namespace=namespace, prompt=wire.i32([9]))
    assert [r.epoch for r in wire.stub.History(request).responses] == [FIRST_EPOCH] * 2


def test_a_count_ends_at_the_last_epoch(start_server: Starter, connect: Connector) -> None:
    """An older server stored it, which accepted any epoch: the problem stays readable and accepts responses."""
    server = start_server("--specrl-namespace", "run")
    server.terminate()
    assert server.wait() == 0
    store = SQLiteStore(server.data_dir, 8)
    put(store, np.array([1], "<i4").tobytes(), LAST_EPOCH, prompt=np.array([9], "<i4").tobytes())
    store.close()
    server.start()
    one = Worker(connect(server.endpoint), "run")
    assert [one.commit(changes=c) for c in (0, 1, 2**32 - 1)] == [LAST_EPOCH] * 3
    wire = connect(server.endpoint)
    wire.ingest([9], [[2]])
    for text in ([3], [4]):
        time.sleep(1.1 * PAUSE_SECONDS)  # otherwise both are one visit of the prompt
        assert Updater(wire.channel).update([1, 2], [text])
    assert wire.stub.Rewind(pb.RewindRequest(namespace="run", epoch=3)).responses > 0
    wire.ingest([9], [[3]])
    assert wire.history([9]) == [[3]]
