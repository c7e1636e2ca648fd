"""Which responses of a problem are kept, compared with sorting all of them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from histospec.server.stores.interface import Record
from histospec.server.stores.sqlite.writes import Window

BATCHES = st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=12)


@given(BATCHES, st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
def test_the_newest_epochs_and_of_these_the_newest_responses_stay(
    batches: list[list[int]], epochs: int, responses: int, slack: int
) -> None:
    window = Window([])
    held: list[Record] = []
    arrived = 0
    for batch in batches:
        records = [Record(b"", epoch, seed=arrived + i) for i, epoch in enumerate(batch)]
        arrived += len(records)
        stay, leave = window.admit(records, epochs, responses, slack)
        window.remove_oldest(leave)
        window.add(stay)
        everything = sorted([*held, *records], key=lambda record: (record.epoch, record.seed))
        newest = sorted({record.epoch for record in everything})[-epochs:]
        held = [record for record in everything if record.epoch in newest]
        if len(held) > responses + slack:
            held = held[-responses:]
        assert leave == len([record for record in everything if record not in held and record not in records])
        assert stay == [record for record in held if record in records]
        assert Window(Counter(record.epoch for record in held).items()).__dict__ == window.__dict__
