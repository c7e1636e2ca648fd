"""Each hint appears for numbers that need it, and for no others."""

from typing import Any

import pytest

from histospec.server.observability.health_hints import Facts, NamespaceFacts, hints
from histospec.server.security.rejections import Rejected
from histospec.server.stores.interface import StoreSize

WELL = NamespaceFacts(
    "run", hits=900, misses=100, history_responses=5000, hits_ever=9000, lookups_ever=9999, drafted=9000, accepted=6000
)
BUSY = Facts(streams=4, lookups_ever=9000, index_bytes=5, memory=10, draft_p99=0.002, namespaces=[WELL])


def test_nothing_is_said_where_all_is_well() -> None:
    assert hints(BUSY) == []


def with_namespace(*others: NamespaceFacts, **changes: Any) -> Facts:
    return BUSY._replace(namespaces=[WELL._replace(**changes), *others])


CASES = {
    "unreadable": (
        BUSY._replace(unreadable={"tokens": "it is not TOML"}),
        "bad",
        "The tokens cannot be read",
        "not TOML",
    ),
    "rejected callers": (
        BUSY._replace(rejected=[Rejected("authorization: token 'b' was removed", 9, "Draft", "ipv4:10.0.0.7:5")]),
        "warn",
        "The server rejects callers",
        "9 calls, the last Draft from ipv4:10.0.0.7:5: authorization: token 'b' was removed. These workers",
    ),
    "nothing connected": (Facts(), "info", "Nothing is connected", "HISTOSPEC_ENDPOINT"),
    "opening": (BUSY._replace(waiting={"store": "4 of 9"}), "info", "The store is not open yet", "(store: 4 of 9)"),
    "draining": (BUSY._replace(waiting={"drain": "draining"}), "info", "This shard is draining", "stops when"),
    "too old": (
        BUSY._replace(too_old=2, latest_too_old="epoch 3 in namespace run, whose newest epoch is 9"),
        "warn",
        "Responses are too old to keep",
        "2 responses came with an epoch older",
    ),
    "store errors": (BUSY._replace(store_errors=1), "bad", "The store fails", "1 request failed"),
    "files gone": (
        BUSY._replace(store_trouble="store: the file was deleted"),
        "bad",
        "Nothing can be stored",
        "store: the file was deleted. The server acknowledges no response",
    ),
    "damage": (
        BUSY._replace(damaged=1),
        "bad",
        "The store was damaged",
        "At least 1 stored response could not be read",
    ),
    "a pause": (
        BUSY._replace(retention_paused="the time of day jumped"),
        "warn",
        "Retention is paused",
        "The time of day jumped. Retention deletes nothing until then",
    ),
    "a disk that fills up": (
        BUSY._replace(store_size=StoreSize(held=5, disk_free=9 << 30, disk_size=100 << 30)),
        "warn",
        "The disk is nearly full",
        "9.0 GiB of 100.0 GiB are free on the volume of --data-dir",
    ),
    "a store that fills up": (
        BUSY._replace(store_size=StoreSize(held=91 << 30, limit=100 << 30, disk_free=50, disk_size=100)),
        "warn",
        "The store is nearly full",
        "The store holds 91.0 GiB of its limit of 100.0 GiB",
    ),
    "a Redis that evicts": (
        BUSY._replace(store_hazard="maxmemory-policy of Redis is allkeys-lru; set noeviction"),
        "warn",
        "The store may delete responses",
        "maxmemory-policy of Redis is allkeys-lru; set noeviction. When its memory is full",
    ),
    "a shard away": (BUSY._replace(away=["b", "c"]), "bad", "Not serving: b, c", "log"),
    "slow drafts": (BUSY._replace(draft_p99=0.034), "warn", "Drafts come late", "at least 34 ms"),
    "first epoch": (
        with_namespace(hits=0, misses=64, history_responses=0, drafted=0, accepted=0),
        "info",
        "run: first epoch",
        "Nothing is stored yet",
    ),
    "wrong namespace": (
        with_namespace(
            NamespaceFacts("code", history_responses=9), hits=0, misses=64, history_responses=0, drafted=0, accepted=0
        ),
        "info",
        "run: first epoch",
        "the history of code: is HISTOSPEC_NAMESPACE right?",
    ),
    "a similar name": (
        with_namespace(
            NamespaceFacts("run1", hits=5, history_responses=9), hits=0, misses=64, history_responses=0, drafted=0
        ),
        "info",
        "run: first epoch",
        "Namespace run1, which has 9 responses, has a similar name: is HISTOSPEC_NAMESPACE right?",
    ),
    "a similar name, with little of its own": (
        with_namespace(
            NamespaceFacts("runs", history_responses=90),
            hits=0,
            misses=64,
            hits_ever=0,
            lookups_ever=64,
            history_responses=3,
        ),
        "info",
        "run: probably the first epoch",
        "Namespace runs, which has 90 responses, has a similar name: is HISTOSPEC_NAMESPACE right?",
    ),
    "nothing left of what was": (
        with_namespace(hits=0, misses=64, history_responses=0, newest_epoch=7, drafted=0, accepted=0),
        "warn",
        "run: no history",
        "Responses up to epoch 7 were stored, but the index holds none",
    ),
    "later epochs in which no prompt came back": (
        with_namespace(hits=1, misses=5000, hits_ever=1, lookups_ever=5001, history_responses=1, newest_epoch=2),
        "info",
        "run: prompts have not repeated",
        "1 response stored, the newest of epoch 2, and almost no prompt has repeated",
    ),
    "later in the first epoch": (
        with_namespace(hits=1, misses=5000, hits_ever=1, lookups_ever=5001, history_responses=1),
        "info",
        "run: probably the first epoch",
        "1 response stored, and almost no prompt has repeated yet",
    ),
    "prompts never repeat": (
        with_namespace(hits=0, misses=500, hits_ever=9, lookups_ever=20_000),
        "warn",
        "run: prompts never repeat",
        "almost none of 20,000 sessions has a known problem",
    ),
    "prompts no longer repeat": (
        with_namespace(hits=1, misses=99),
        "warn",
        "run: prompts no longer repeat",
        "In the last ten minutes, 99% of 100 sessions had an unknown problem",
    ),
    "ids that are new in each step": (
        with_namespace(hits=0, misses=41, misnamed=31, hits_ever=0, lookups_ever=41),
        "warn",
        "run: prompts are known under other ids",
        "31 of 41 sessions named a problem without history, while their prompts are known under other problem ids",
    ),
    "ids that are new in some of the requests": (
        with_namespace(hits=800, misses=200, misnamed=200),
        "warn",
        "run: prompts are known under other ids",
        "leave the ids out",
    ),
    "a run that went back": (
        with_namespace(behind=20, behind_epoch=16, newest_epoch=20),
        "warn",
        "run: epochs have gone back",
        "The last 20 responses are of epoch 16 or older, and the newest epoch is 20. If the run continues from a "
        "checkpoint, call `rewind`",
    ),
    "evicted": (
        with_namespace(hits=500, misses=500)._replace(evicted=1200, index_bytes=9.5),
        "warn",
        "History is evicted",
        "it evicted 1,200 responses in the last ten minutes, and 50% of the sessions found no history. Raise --memory",
    ),
    "low acceptance": (
        with_namespace(accepted=900),
        "warn",
        "run: few draft tokens are accepted",
        "Only 10% of the tokens drafted from history are accepted: the policy has changed much",
    ),
    "low acceptance of the same weights": (
        with_namespace(accepted=900, same_weights=True),
        "warn",
        "run: few draft tokens are accepted",
        "Only 10% of the tokens drafted from history are accepted: most are of responses of the same epoch",
    ),
    "verifying costs too much": (
        with_namespace(verify_cost=0.6),
        "info",
        "run: verifying costs too much to draft",
        "0.60 of a step without drafts",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_told_with_what_to_do(case: str) -> None:
    facts, level, title, text = CASES[case]
    [hint] = hints(facts)
    assert (hint.level, hint.title) == (level, title)
    assert text in hint.text
    assert "\n" not in hint.text


@pytest.mark.parametrize(
    "facts",
    [
        with_namespace(hits=0, misses=19),  # too few lookups
        with_namespace(hits=6, misses=94),
        with_namespace(hits=900, misses=100, misnamed=100),  # a few problems may share a prompt
        with_namespace(behind=19, behind_epoch=1, newest_epoch=2),  # asynchronous workers are late
        with_namespace(hits=0, misses=0, behind=20, behind_epoch=1, newest_epoch=2),  # the run has ended
        with_namespace(drafted=999, accepted=0),
        with_namespace(verify_cost=0.44),
        with_namespace(verify_cost=0.6)._replace(streams=0),  # an old report
        with_namespace(hits=500, misses=500)._replace(evicted=1200),  # evicted by age: memory is not full
        with_namespace(hits=900, misses=100)._replace(evicted=1200, index_bytes=9.5),  # few sessions miss it
        BUSY._replace(draft_p99=0.02),
        BUSY._replace(streams=0, draft_p99=None),  # idle after work
        BUSY._replace(store_size=StoreSize(held=90, limit=100, disk_free=10, disk_size=100)),
        BUSY._replace(store_size=StoreSize(held=10**15)),  # without a limit
    ],
)
def test_nothing_is_said_below_the_limits(facts: Facts) -> None:
    assert hints(facts) == []


def test_the_worst_comes_first() -> None:
    facts = with_namespace(verify_cost=0.6)._replace(draft_p99=1.0, store_errors=2)
    assert [hint.level for hint in hints(facts)] == ["bad", "warn", "info"]
