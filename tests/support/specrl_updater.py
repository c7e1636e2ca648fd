"""SpecRL's updater as its own protocol has it: nothing of ours, neither the messages nor the stubs."""

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import numpy as np
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

TOKENS = {"name": "tokens", "number": 1, "label": "LABEL_REPEATED", "type": "TYPE_INT32"}
TOKEN_LIST = {"type": "TYPE_MESSAGE", "typeName": ".specrl.TokenList"}
PROTOCOL = {
    "name": "rollout-cache.proto",
    "package": "specrl",
    "syntax": "proto3",
    "messageType": [
        {"name": "TokenList", "field": [TOKENS]},
        {
            "name": "UpdateCacheRequest",
            "field": [
                {"name": "prompt_hash", "number": 1, "label": "LABEL_OPTIONAL", "type": "TYPE_UINT64"},
                {"name": "prompt", "number": 2, "label": "LABEL_OPTIONAL", **TOKEN_LIST},
                {"name": "responses", "number": 3, "label": "LABEL_REPEATED", **TOKEN_LIST},
            ],
        },
        {
            "name": "UpdateCacheResponse",
            "field": [{"name": "success", "number": 1, "label": "LABEL_OPTIONAL", "type": "TYPE_BOOL"}],
        },
    ],
}
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(json_format.ParseDict(PROTOCOL, descriptor_pb2.FileDescriptorProto()))
_request, _response = (
    message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"specrl.UpdateCache{kind}"))
    for kind in ("Request", "Response")
)


def hash_of(prompt: Iterable[int]) -> int:
    """XXH64 of the prompt's int32."""
    return xxhash.xxh64_intdigest(np.array(list(prompt), "<i4").tobytes(), seed=0)


Group = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A prompt and its responses."""


class Updater:
    """Sends as SpecRL's does: a call for each prompt, all of them at once, with no deadline, token or second try."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._call = channel.unary_unary(
            "/specrl.RolloutCacheService/UpdateCache",
            request_serializer=_request.SerializeToString,
            response_deserializer=_response.FromString,
        )

    def update(
        self,
        prompt: Sequence[int],
        responses: Sequence[Sequence[int]],
        prompt_hash: int | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> bool:
        """One call; the `success` that it is answered with. Raises grpc.RpcError."""
        return bool(self._call(request(prompt, responses, prompt_hash), metadata=tuple(metadata)).success)

    def burst(self, groups: Iterable[Group]) -> list[str]:
        """The prompts of a training step with their responses; what it prints about those that failed."""
        return failures(self.start(groups))

    def start(self, groups: Iterable[Group]) -> list[Any]:
        """The calls of a burst, which go on by themselves."""
        return [self._call.future(request(*group)) for group in groups]


def failures(calls: Iterable[Any]) -> list[str]:
    """Waits until all calls are answered; what the updater prints about those that failed."""
    return [str(call.details()) for call in calls if call.exception() or not call.result().success]


def request(prompt: Sequence[int], responses: Sequence[Sequence[int]], prompt_hash: int | None = None) -> Any:
    return _request(
        prompt_hash=hash_of(prompt) if prompt_hash is None else prompt_hash,
        prompt={"tokens": prompt},
        responses=[{"tokens": tokens} for tokens in responses],
    )
