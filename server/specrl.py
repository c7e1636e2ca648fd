"""`specrl.RolloutCacheService`: what SpecRL's updater sends becomes history.

The updater sends a prompt and all its responses in one call, after every training step, and says no epoch. SpecRL's
own cache keeps the last visit of a prompt alone. Here a visit is what an epoch stands for: it counts for the newest
epoch of the namespace, and a prompt that had its visit in that epoch begins the next one. So histories age and leave as
they do where a trainer counts its epochs, and where it does so in this namespace, its count is followed.
"""

import asyncio
from typing import Any

import grpc.aio
import numpy as np
import xxhash

from histospec.server import wire
from histospec.server.access import Access
from histospec.server.config import Config
from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.history import History
from histospec.server.ingest import ingest
from histospec.specrl import rollout_cache_pb2 as pb
from histospec.specrl import rollout_cache_pb2_grpc as pb_grpc
from histospec.v1 import draft_pb2

MAX_VISITS = 1 << 20
"""Prompts that an epoch of ours may have, 100 MB of them; one more begins the next."""


class Visits:
    """Which prompts had their visit in the newest epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._prompts: set[int] = set()

    def epoch(self, prompt: int, newest: int) -> int:
        """The epoch of the visit that now comes to a prompt, named by its hash, where `newest` is the newest so far."""
        if newest != self._epoch or (prompt not in self._prompts and len(self._prompts) < MAX_VISITS):
            return newest
        return newest + 1

    def note(self, prompt: int, epoch: int) -> None:
        """Notes a visit."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._prompts.clear()
        self._prompts.add(prompt)


class RolloutCacheService(pb_grpc.RolloutCacheServiceServicer):
    """Errors are raised as they are; the interceptor turns them into gRPC statuses."""

    def __init__(self, history: History, config: Config, access: Access) -> None:
        self._history = history
        self._config = config
        self._access = access
        self._visits = Visits()

    async def UpdateCache(  # noqa: N802 - gRPC's name
        self, request: pb.UpdateCacheRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.UpdateCacheResponse:
        """See rollout_cache.proto."""
        namespace = self._config.specrl_namespace
        self._access.permit(dict(context.invocation_metadata() or ())).require("write", namespace)
        translated = await self._translated(request)
        epoch = self._visits.epoch(request.prompt_hash, self._history.newest_epoch(namespace))
        batch, _ = wire.ingest(translated, self._config, epoch)
        self._visits.note(request.prompt_hash, epoch)
        self._history.saw(batch)  # before it is stored: the other prompts of this visit are on their way
        await ingest(self._history, batch, context.peer())
        return pb.UpdateCacheResponse(success=True)

    async def _translated(self, request: pb.UpdateCacheRequest) -> draft_pb2.IngestRequest:
        """The same in our own protocol. Raises InvalidRequest, and LimitExceeded before anything large is copied."""
        if not request.responses:
            raise InvalidRequest("responses: must not be empty")
        config = self._config
        prompt = _array("prompt", request.prompt, config.max_prompt_tokens)
        if request.prompt_hash != (right := xxhash.xxh64_intdigest(prompt, seed=0)):
            text = f"prompt_hash: {request.prompt_hash} is not the XXH64 of the prompt's {len(prompt) // 4} tokens"
            raise InvalidRequest(f"{text}, which is {right}")
        responses = []
        for i, response in enumerate(request.responses[: config.max_batch + 1]):  # one too many is refused
            await asyncio.sleep(0)  # 60 us for 1,000 tokens: steps go first
            tokens = _array(f"responses[{i}].tokens", response, config.max_session_tokens)
            responses.append(draft_pb2.Response(tokens=tokens))
        return draft_pb2.IngestRequest(namespace=config.specrl_namespace, prompt=prompt, responses=responses)


def _array(field: str, tokens: pb.TokenList, limit: int) -> bytes:
    """Little-endian int32, as `wire` takes them."""
    if len(tokens.tokens) > limit:
        raise LimitExceeded(f"{field}: {len(tokens.tokens)} tokens are more than the limit of {limit}")
    return np.fromiter(tokens.tokens, wire.INT32, len(tokens.tokens)).tobytes()
