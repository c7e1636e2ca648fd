"""`specrl.RolloutCacheService`: what SpecRL's updater sends becomes history.

The updater sends a prompt and all its responses in one call, after every training step, and says no epoch. SpecRL's
own cache keeps the last visit of a prompt alone. Here a visit is what an epoch stands for: it counts for the newest
epoch of the namespace, and a prompt that had its visit in that epoch begins the next one. So histories age and leave as
they do where a trainer counts its epochs, and where it does so in this namespace, its count is followed.

Tokens travel as packed numbers of one byte or more, which become four each. The lists are therefore counted before
they are decoded, and decoded piece by piece: steps go first.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from histospec.protocol.arrays import INT32
from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.history.history import History
from histospec.server.rpc import encoded, wire
from histospec.server.rpc.ingest import ingest
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.specrl import rollout_cache_pb2 as pb
from histospec.specrl import rollout_cache_pb2_grpc as pb_grpc
from histospec.v1 import draft_pb2

MAX_VISITS = 1 << 20
"""Prompts that an epoch of ours may have, 100 MB of them; one more begins the next."""


PIECE = 64 << 10  # bytes that are decoded at once
LAST = 0x80  # bytes of a number are not below, but for its last
TOKENS_TAG = 0x0A  # of a TokenList's only field, packed
HASH, PROMPT, RESPONSES = 1, 2, 3  # fields of an UpdateCacheRequest


class Update(NamedTuple):
    """An UpdateCacheRequest whose lists of tokens are still encoded."""

    prompt_hash: int
    prompt: bytes
    responses: list[memoryview]


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

    async def UpdateCache(  # type: ignore[override]  # noqa: N802 - gRPC's name; see `read`
        self, request: Update, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.UpdateCacheResponse:
        """See rollout_cache.proto."""
        namespace = self._config.specrl_namespace
        self._access.permit(dict(context.invocation_metadata() or ())).require("write", namespace)
        self._history.require_open()  # before the visit is noted
        translated = await self._translated(request)
        epoch = self._visits.epoch(request.prompt_hash, self._history.epochs.newest(namespace))
        batch, _ = wire.ingest(translated, self._config, epoch)
        self._visits.note(request.prompt_hash, epoch)
        self._history.epochs.saw(batch)  # before it is stored: the other prompts of this visit are on their way
        await ingest(self._history, batch, context.peer())
        return pb.UpdateCacheResponse(success=True)

    async def _translated(self, request: Update) -> draft_pb2.IngestRequest:
        """The same in our own protocol. Raises InvalidRequest, and LimitExceeded before anything large is decoded."""
        if not request.responses:
            raise InvalidRequest("responses: must not be empty")
        config = self._config
        prompt = await tokens_of("prompt", request.prompt, config.max_prompt_tokens)
        if request.prompt_hash != (right := xxhash.xxh64_intdigest(prompt, seed=0)):
            text = f"prompt_hash: {request.prompt_hash} is not the XXH64 of the prompt's {len(prompt) // 4} tokens"
            raise InvalidRequest(f"{text}, which is {right}")
        encoded.refuse_more("responses", len(request.responses), config.max_batch)
        responses = []
        for i, response in enumerate(request.responses):
            tokens = await tokens_of(f"responses[{i}].tokens", response, config.max_session_tokens)
            responses.append(draft_pb2.Response(tokens=tokens))
        return draft_pb2.IngestRequest(namespace=config.specrl_namespace, prompt=prompt, responses=responses)


def read(data: bytes, config: Config) -> Update:
    """An UpdateCacheRequest, its lists of tokens not yet decoded.

    Raises DecodeError, and LimitExceeded for more tokens than an ingest of that size may have.
    """
    most = left = config.max_message // INT32.itemsize
    prompt_hash = 0
    prompt: list[memoryview] = []
    responses: list[memoryview] = []
    whole = memoryview(data)
    for number, kind, begin, end in encoded.fields(data, 0, len(data)):
        if number == HASH and kind == encoded.VARINT:
            prompt_hash = encoded.varint(data, begin, end)[0] & (1 << 64) - 1
        elif kind == encoded.BYTES and number in (PROMPT, RESPONSES):
            part = whole[begin:end]
            left -= _numbers(part)
            if left < 0:
                text = (
                    f"message: {most - left} tokens or more are over the limit of {most} (--max-message, 4 bytes each)"
                )
                raise LimitExceeded(text)
            (prompt if number == PROMPT else responses).append(part)
    return Update(prompt_hash, b"".join(prompt), responses)


async def tokens_of(field: str, part: bytes | memoryview, limit: int) -> bytes:
    """The tokens of an encoded TokenList as little-endian int32, as `wire` takes them."""
    packed = _packed(part)
    if packed is None:
        if len(part) > encoded.SMALL:
            raise InvalidRequest(f"{field}: its {len(part)} bytes are not one packed field")
        try:
            numbers = pb.TokenList.FromString(bytes(part)).tokens
        except DecodeError:
            raise InvalidRequest(f"{field}: its {len(part)} bytes are not a TokenList") from None
        _check_number(field, len(numbers), limit)
        return np.array(numbers, INT32).tobytes()
    _check_number(field, _numbers(packed), limit)
    pieces = []
    for piece in _pieces(field, packed):
        pieces.append(_decoded(field, piece))
        await asyncio.sleep(0)  # 1 ms: steps go first
    return b"".join(pieces)


def _check_number(field: str, number: int, limit: int) -> None:
    if number > limit:
        raise LimitExceeded(f"{field}: {number} tokens are more than the limit of {limit}")


def _packed(part: bytes | memoryview) -> memoryview | None:
    """What is packed into the only field of a TokenList; None where it has others."""
    if not part or part[0] != TOKENS_TAG:
        return None
    try:
        size, begin = encoded.varint(part, 1, len(part))
    except DecodeError:
        return None
    return memoryview(part)[begin:] if begin + size == len(part) else None


def _numbers(encoded_numbers: bytes | memoryview) -> int:
    """How many there are at most: each ends with a byte below 0x80."""
    return int(np.count_nonzero(np.frombuffer(encoded_numbers, np.uint8) < LAST))


def _pieces(field: str, packed: memoryview) -> Iterator[NDArray[np.uint8]]:
    """Packed numbers, in pieces of whole ones. Raises InvalidRequest where the last one has no end."""
    rest = np.frombuffer(packed, np.uint8)
    while rest.size:
        ends = np.flatnonzero(rest[:PIECE] < LAST)
        if not ends.size or (rest.size <= PIECE and rest[-1] >= LAST):
            raise InvalidRequest(f"{field}: a token has no end")
        yield rest[: ends[-1] + 1]
        rest = rest[ends[-1] + 1 :]


def _decoded(field: str, piece: NDArray[np.uint8]) -> bytes:
    """Of each number the lower 32 bits, as protobuf reads an int32."""
    ends = np.flatnonzero(piece < LAST)
    begins = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - begins + 1
    if lengths.max() > encoded.LONGEST_VARINT:
        raise InvalidRequest(f"{field}: a token has no end")
    values = np.zeros(ends.size, np.uint64)
    for i in range(min(int(lengths.max()), 5)):
        longer = lengths > i
        values[longer] |= (piece[begins[longer] + i] & np.uint64(0x7F)) << np.uint64(7 * i)
    return values.astype("<u4").tobytes()
