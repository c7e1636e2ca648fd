"""`specrl.RolloutCacheService`: stores what SpecRL's updater sends as history.

After every training step, the updater sends each prompt with all its responses in one call, without an epoch, and all
these calls at once. SpecRL's own cache keeps only the last update of a prompt. Here, `Visits` gives each update an
epoch, so histories age and leave as with a trainer that counts epochs. If a trainer does so in this namespace, its
count is followed.

The updater neither retries nor gives up. So where an `Ingest` is refused for now, an update waits, and its trainer
waits for it in the end. Few more than AT_ONCE updates are in memory: the server reads the message of another one when a
place is free. Until then it stays with the updater, except for the 64 KiB that HTTP/2 lets it send.

Tokens travel as packed numbers of one or more bytes, which become four bytes each. So the lists are counted before they
are decoded, and decoded piece by piece, so that steps run in between.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import structlog
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from histospec.protocol.arrays import INT32
from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc import encoded, wire
from histospec.server.rpc.arrivals import Arrivals, caller
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.server.stores.interface import LAST_EPOCH, Problem, Record, ResponseBatch
from histospec.specrl import rollout_cache_pb2 as pb
from histospec.specrl import rollout_cache_pb2_grpc as pb_grpc

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)

AT_ONCE = 8
"""Updates that the server reads, stores and indexes at the same time; others wait in the order of their arrival."""
PATIENCE = 600.0
"""Seconds from the arrival of an update in which it may wait for room in the store and the index."""
NO_TOKEN = (
    "SpecRL's updater cannot send one: send to a server without --tokens in a trusted network, through a proxy that "
    "adds the header 'authorization: Bearer TOKEN', or call DraftClient.ingest instead of the updater"
)
"""What to do about a missing token."""

PAUSE_SECONDS = 1.0
BURST_SECONDS = 60.0
MAX_PROMPTS = 1 << 20
"""Prompts of an epoch that are remembered, about 100 MB of them; one more starts the next epoch."""

PIECE = 64 << 10  # bytes decoded at a time
LAST = 0x80  # the last byte of a number is below, all others are not
TOKENS_TAG = 0x0A  # the tag of a TokenList's only field, packed
HASH, PROMPT, RESPONSES = 1, 2, 3  # fields of an UpdateCacheRequest


class Update(NamedTuple):
    """An UpdateCacheRequest whose lists of tokens are still encoded."""

    prompt_hash: int
    prompt: bytes
    responses: list[memoryview]


class Visits:
    """Gives updates epochs: knows which prompts had one in the newest epoch, and in which burst.

    The updater sends all prompts of a training step, or of a batch of validation, at the same time: a burst. A prompt
    that returns in a later burst starts the next epoch. A prompt that appears several times in one burst, as each copy
    of a repeated validation set does, starts none.

    A burst begins with an update that arrives after a pause of PAUSE_SECONDS, in which the server handled no update. It
    takes the updates that arrive until the next pause, and at most for BURST_SECONDS, so that the epochs of a trainer
    that never pauses advance, too. Used only on the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_prompts: int = MAX_PROMPTS) -> None:
        self._clock = clock
        self._most_prompts = most_prompts
        self._burst = 0
        self._began = self._answered = -PAUSE_SECONDS
        self._running = 0
        self._epoch = -1
        self._advanced = 0  # the burst that began this epoch
        self._prompts: dict[int, int] = {}  # by hash: the last burst

    @contextmanager
    def update(self) -> Iterator[int]:
        """Yields the burst of an update that arrives now; the block handles the update."""
        now = self._clock()
        paused = not self._running and now - self._answered >= PAUSE_SECONDS
        if not self._burst or paused or now - self._began >= BURST_SECONDS:
            self._burst += 1
            self._began = now
        self._running += 1
        try:
            yield self._burst
        finally:
            self._running -= 1
            self._answered = self._clock()

    def epoch(self, prompt: int, burst: int, newest: int) -> int:
        """Returns the epoch for an update of a prompt, by hash: `newest`, the namespace's newest, or the next one."""
        if newest != self._epoch:
            return newest
        before = self._prompts.get(prompt)
        if before is None:
            return newest + (len(self._prompts) >= self._most_prompts)
        return newest + (burst > max(before, self._advanced))

    def note(self, prompt: int, burst: int, epoch: int) -> None:
        """Records an update."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._advanced = burst
            self._prompts.clear()
        self._prompts[prompt] = max(burst, self._prompts.get(prompt, 0))


class RolloutCacheService(pb_grpc.RolloutCacheServiceServicer):
    """The service. It raises errors; the interceptor turns these into gRPC statuses."""

    def __init__(self, history: History, config: Config, access: Access, metrics: Metrics) -> None:
        self._history = history
        self._config = config
        self._access = access
        self._visits = Visits()
        self.arrivals = Arrivals(metrics, AT_ONCE)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def UpdateCache(
        self, unread: object, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.UpdateCacheResponse:
        permit = self._access.permit(dict(context.invocation_metadata() or ()))
        permit.require("write", self._config.specrl_namespace)
        self._history.require_open()
        until = time.monotonic() + PATIENCE
        with self._visits.update() as burst:
            async with self.arrivals.receive(context, caller(permit, context)) as update, self._places:
                await self._add(update, burst, context.peer(), until)
        return pb.UpdateCacheResponse(success=True)

    async def _add(self, update: Update, burst: int, peer: str, until: float) -> None:
        """Stores and indexes an update. `until`: when it stops waiting for room, by `time.monotonic`."""
        namespace, prompt_hash, sent = self._config.specrl_namespace, update.prompt_hash, len(update.responses)
        prompt, texts = await self._texts(update)
        del update  # from here on, only its decoded copy takes memory
        epoch = self._visits.epoch(prompt_hash, burst, self._history.epochs.newest(namespace))
        records = [Record(tokens, min(epoch, LAST_EPOCH)) for tokens in texts]
        batch = ResponseBatch(Problem(namespace, prompt), records)
        if sent > len(records) and (more := THROTTLE.admits("empty")) is not None:
            empty = sent - len(records)
            log.warning("empty responses left out", peer=peer, empty=empty, others=len(records), **more)
        if records:
            self._visits.note(prompt_hash, burst, epoch)
            self._history.epochs.saw(batch)  # before it is stored: other prompts of this burst are arriving
        await self._history.add(batch, peer, patience=until - time.monotonic())

    async def _texts(self, update: Update) -> tuple[bytes, list[bytes]]:
        """Returns the tokens of the prompt and of the responses that are not empty.

        Raises InvalidRequest, and LimitExceeded before decoding much.
        """
        config = self._config
        if not update.responses:
            raise InvalidRequest("responses: must not be empty")
        prompt = await tokens_of("prompt", update.prompt, config.max_prompt_tokens)
        if update.prompt_hash != (right := xxhash.xxh64_intdigest(prompt, seed=0)):
            text = f"prompt_hash: {update.prompt_hash} is not the XXH64 of the prompt's {len(prompt) // 4} tokens"
            raise InvalidRequest(f"{text}, which is {right}")
        if not wire.token_array("prompt", prompt).size:
            raise InvalidRequest("prompt: must not be empty")
        encoded.refuse_more("responses", len(update.responses), config.max_batch)
        texts = []
        for i, response in enumerate(update.responses):
            texts.append(await tokens_of(f"responses[{i}].tokens", response, config.max_session_tokens))
            wire.token_array(f"responses[{i}].tokens", texts[-1])
        return prompt, [tokens for tokens in texts if tokens]


def read(data: bytes, config: Config) -> Update:
    """Returns an UpdateCacheRequest whose lists of tokens are not decoded yet.

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
                    f"message: at least {most - left} tokens are over the limit of {most} (--max-message, 4 bytes each)"
                )
                raise LimitExceeded(text)
            (prompt if number == PROMPT else responses).append(part)
    return Update(prompt_hash, b"".join(prompt), responses)


async def tokens_of(field: str, part: bytes | memoryview, limit: int) -> bytes:
    """Returns the tokens of an encoded TokenList as little-endian int32, the input of `wire`."""
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
        await asyncio.sleep(0)  # after 1 ms of work, let steps run
    return b"".join(pieces)


def _check_number(field: str, number: int, limit: int) -> None:
    if number > limit:
        raise LimitExceeded(f"{field}: {number} tokens are more than the limit of {limit}")


def _packed(part: bytes | memoryview) -> memoryview | None:
    """Returns the packed contents of a TokenList with only that field; None if it has others."""
    if not part or part[0] != TOKENS_TAG:
        return None
    try:
        size, begin = encoded.varint(part, 1, len(part))
    except DecodeError:
        return None
    return memoryview(part)[begin:] if begin + size == len(part) else None


def _numbers(encoded_numbers: bytes | memoryview) -> int:
    """Returns an upper bound of the number of tokens: each ends with a byte below 0x80."""
    return int(np.count_nonzero(np.frombuffer(encoded_numbers, np.uint8) < LAST))


def _pieces(field: str, packed: memoryview) -> Iterator[NDArray[np.uint8]]:
    """Yields packed numbers in pieces of whole numbers. Raises InvalidRequest if the last number is incomplete."""
    rest = np.frombuffer(packed, np.uint8)
    while rest.size:
        ends = np.flatnonzero(rest[:PIECE] < LAST)
        if not ends.size or (rest.size <= PIECE and rest[-1] >= LAST):
            raise InvalidRequest(f"{field}: the last token is incomplete")
        yield rest[: ends[-1] + 1]
        rest = rest[ends[-1] + 1 :]


def _decoded(field: str, piece: NDArray[np.uint8]) -> bytes:
    """Returns the lower 32 bits of each number, as protobuf reads an int32."""
    ends = np.flatnonzero(piece < LAST)
    begins = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - begins + 1
    if lengths.max() > encoded.LONGEST_VARINT:
        raise InvalidRequest(f"{field}: a token is longer than 10 bytes")
    values = np.zeros(ends.size, np.uint64)
    for i in range(min(int(lengths.max()), 5)):
        longer = lengths > i
        values[longer] |= (piece[begins[longer] + i] & np.uint64(0x7F)) << np.uint64(7 * i)
    return values.astype("<u4").tobytes()
