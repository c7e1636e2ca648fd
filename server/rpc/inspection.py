"""Answers Inspect: the caller's rights in a namespace, its contents, and similar names that the caller may mean."""

from itertools import islice
from typing import get_args

from histospec.native import Engine
from histospec.server.history.history import History
from histospec.server.history.namespaces import look_alikes
from histospec.server.security.access import Permit, Right
from histospec.v1 import draft_pb2 as pb

MOST_SIMILAR = MOST_SHARED = 8
COUNTED = (
    "lookups_hit", "lookups_miss", "drafts_hit", "drafts_empty", "undrafted_tokens", "draft_tokens", "accepted_tokens",
    "generated_tokens",
)  # fmt: skip
"""Counters of the engine that the answer has under the same names."""


def inspect(engine: Engine, history: History, permit: Permit, namespace: str) -> pb.InspectResponse:
    """Returns the part of the answer about a namespace. Takes milliseconds with thousands of namespaces.

    Raises Unauthenticated.
    """
    answer = pb.InspectResponse(
        rights=[right for right in get_args(Right) if permit.allows(right, namespace)],
        loaded=history.loading.done.is_set(),
    )
    if "write" in answer.rights:
        answer.trouble = history.trouble
    names, columns, values, _ = engine.counters()
    if "read" in answer.rights and namespace in names:
        row = dict(zip(columns, values[names.index(namespace)].tolist(), strict=True))
        answer.facts.CopyFrom(
            pb.NamespaceFacts(
                problems=row["problems"],
                responses=row["history_responses"],
                sessions=row["sessions"],
                newest_epoch=history.epochs.newest(namespace),
                model_draft_tokens=row["model.draft_tokens"],
                model_accepted_tokens=row["model.accepted_tokens"],
                **{name: row[name] for name in COUNTED},
            )
        )
        answer.shared.extend(_shared(engine, permit, namespace))
    near = look_alikes(namespace, names, MOST_SIMILAR)
    answer.similar.extend(name for name in near if permit.allows("read", name))
    return answer


def _shared(engine: Engine, permit: Permit, namespace: str) -> list[pb.SharedPrompts]:
    asked, known = engine.shared_prompts(namespace)
    most_first = sorted(known.items(), key=lambda one: (-one[1], one[0]))
    readable = ((name, prompts) for name, prompts in most_first if permit.allows("read", name))
    return [
        pb.SharedPrompts(namespace=name, prompts=prompts, asked=asked)
        for name, prompts in islice(readable, MOST_SHARED)
    ]
