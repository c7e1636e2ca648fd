"""Hostile clients: messages that are cut, flipped or random, and streams that behave unlike a worker."""

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from histospec.v1 import draft_pb2 as pb
from tests.support.wires import Wire, i32

METHODS = ("Ingest", "History", "PredictLength", "PredictLengths", "Draft")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE = 20.0  # seconds of a stream
ANSWER_SECONDS = 60.0  # of a message: on a busy machine the server comes to it later
THROWN_OUT = (OSError, grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError)


def sound(method: str, chance: random.Random) -> bytes:
    """A message that the server would take, in a namespace of its own."""
    who: dict[str, Any] = {"namespace": "hostile", "prompt": i32([chance.randrange(50), 2])}
    if method == "Ingest":
        responses = [pb.Response(tokens=i32(range(chance.randrange(1, 30))), seed=chance.randrange(-2, 2))]
        return pb.IngestRequest(**who, responses=responses, epoch=chance.randrange(3)).SerializeToString()
    if method == "History":
        return pb.HistoryRequest(**who).SerializeToString()
    if method == "PredictLength":
        return pb.PredictLengthRequest(**who, quantiles=[0.5]).SerializeToString()
    if method == "PredictLengths":
        problems = [pb.ExpectedResponse(prompt=i32([chance.randrange(50), 2]), generated=chance.randrange(9))] * 3
        return pb.PredictLengthsRequest(namespace=who["namespace"], problems=problems).SerializeToString()
    most, cost = chance.choice([0, 16, 2**32 - 1]), chance.choice([0.0, 0.05, float("nan")])
    step = Wire.step([1], [[4, 5, 6]], max_tokens=most, verify_cost=cost)
    close = pb.CloseSession(session=1, commit=True, generated=chance.choice([3, 4, 2**32 - 1]))
    opening = pb.OpenSession(session=1, seed=chance.randrange(-2, 2), **who)
    return pb.DraftRequest(opens=[opening], step=step, closes=[close]).SerializeToString()


def spoiled(message: bytes, chance: random.Random) -> bytes:
    """The message, no longer what it was."""
    kind = chance.randrange(5)
    if kind == 0:
        return os.urandom(chance.randrange(1, 200))
    if kind == 1:
        return message[: chance.randrange(len(message))]
    text = bytearray(message)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(text))
        if kind == 2:
            text[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            text[at:at] = os.urandom(chance.randrange(1, 9))
        else:
            del text[at : at + chance.randrange(1, 5)]
            text = text or bytearray(b"\xff")
    return bytes(text)


async def messages(endpoint: str, count: int, side_by_side: int = 64, seed: int = 0) -> Counter[str]:
    """Sends so many spoiled messages. -> how often each status came back."""
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def send(number: int) -> None:
        chance = random.Random(1000 * seed + number)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel: Any  # of bytes, which the stubs do not know
        async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
            for _ in left:
                method = chance.choice(METHODS)
                message = spoiled(sound(method, chance), chance)
                path = f"/histospec.v1.DraftService/{method}"
                try:
                    if method == "Draft":
                        call = channel.stream_stream(path)(timeout=ANSWER_SECONDS)
                        await call.write(message)
                        await call.done_writing()
                        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                            pass
                        outcomes[(await call.code()).name] += 1
                    else:
                        await channel.unary_unary(path)(message, timeout=ANSWER_SECONDS)
                        outcomes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    outcomes[error.code().name] += 1
                except asyncio.InvalidStateError:  # the stream ended before it was written to
                    outcomes["ended"] += 1

    await asyncio.gather(*(send(number) for number in range(side_by_side)))
    return outcomes


async def streams(endpoint: str, count: int, side_by_side: int = 32, seed: int = 0) -> Counter[str]:
    """Makes so many streams that behave like no worker. -> how many of each kind."""
    kinds = (_garbage, _preface_and_garbage, _half_a_frame, _never_reads, _vanishes, _opens_too_many, _repeats_itself)
    done: Counter[str] = Counter()
    left = iter(range(count))

    async def attack(number: int) -> None:
        chance = random.Random(2000 * seed + number)
        for _ in left:
            kind = chance.choice(kinds)
            with contextlib.suppress(*THROWN_OUT):
                await asyncio.wait_for(kind(endpoint, chance), PATIENCE)
            done[kind.__name__] += 1

    await asyncio.gather(*(attack(number) for number in range(side_by_side)))
    return done


async def _send_raw(endpoint: str, data: bytes, wait: bool) -> None:
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        if wait:
            await asyncio.wait_for(reader.read(1 << 16), 0.2)
    except asyncio.TimeoutError:
        pass
    finally:
        # Linger of zero: the connection is reset, not closed.
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def _garbage(endpoint: str, chance: random.Random) -> None:
    await _send_raw(endpoint, os.urandom(chance.randrange(1, 5000)), chance.random() < 0.5)


async def _preface_and_garbage(endpoint: str, chance: random.Random) -> None:
    await _send_raw(endpoint, PREFACE + os.urandom(chance.randrange(1, 5000)), chance.random() < 0.5)


async def _half_a_frame(endpoint: str, chance: random.Random) -> None:
    settings = b"\0\0\0\4\0\0\0\0\0"
    headers = struct.pack(">I", 10_000)[1:] + b"\1\4\0\0\0\1" + os.urandom(100)
    await _send_raw(endpoint, PREFACE + settings + headers, True)


@contextlib.asynccontextmanager
async def _draft(endpoint: str) -> AsyncIterator[Any]:
    """A Draft stream on a channel of its own, which goes with the stream still open."""
    channel: Any
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel.stream_stream("/histospec.v1.DraftService/Draft")(timeout=PATIENCE)


async def _never_reads(endpoint: str, chance: random.Random) -> None:
    async with _draft(endpoint) as call:
        for _ in range(chance.randrange(1, 40)):
            await call.write(sound("Draft", chance))
        call.cancel()


async def _vanishes(endpoint: str, chance: random.Random) -> None:
    async with _draft(endpoint) as call:
        await call.write(sound("Draft", chance))


async def _opens_too_many(endpoint: str, chance: random.Random) -> None:
    async with _draft(endpoint) as call:
        for start in (0, 4000, 8000):
            opens = [pb.OpenSession(session=start + i, namespace="hostile", prompt=i32([i])) for i in range(4000)]
            await call.write(pb.DraftRequest(opens=opens).SerializeToString())


async def _repeats_itself(endpoint: str, chance: random.Random) -> None:
    message = sound("Draft", chance)
    async with _draft(endpoint) as call:
        for _ in range(20):
            await call.write(message)  # the second opens a session that is open, or closed already
            await call.read()
