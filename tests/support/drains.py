"""Starts a server and drains it under load repeatedly: `python -m tests.support.drains COUNT FOLDER`.

Prints how often it did.

In one process, so that it is quick; of its own, since what it looks for are crashes.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from histospec.server.app import serve
from histospec.server.logs import lines as logs
from histospec.server.settings.addresses import Address
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc
from tests.support.ports import free_port

STREAMS = 2


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


async def step_for_ever(endpoint: str, begun: asyncio.Event) -> None:
    """A stream that never ends its session, until it is cut off."""
    opens = [pb.OpenSession(session=1, namespace="run", prompt=i32(1, 2))]
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = rpc.DraftServiceStub(channel)  # the stubs know it without asyncio alone
        call = stub.Draft(wait_for_ready=True)
        try:
            await call.write(pb.DraftRequest(opens=opens))
            for position in range(1 << 20):
                step = pb.Step(
                    sessions=np.array([1], "<u8").tobytes(), positions=i32(position), lengths=i32(1), tokens=i32(3),
                    max_tokens=4,
                )  # fmt: skip
                await call.write(pb.DraftRequest(step=step))
                await call.read()
                begun.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def drain_once(config: Config) -> None:
    """One server, from its start to its end."""
    serving = asyncio.ensure_future(serve(config))
    begun = [asyncio.Event() for _ in range(STREAMS)]
    streams = [asyncio.ensure_future(step_for_ever(str(config.listen), event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    await asyncio.gather(*streams)


async def main() -> None:
    """See the module."""
    config = Config(
        listen=Address("127.0.0.1", free_port()),
        http=Address("127.0.0.1", 0),
        data_dir=Path(sys.argv[2]),
        memory=1 << 24,
        drain_seconds=0.01,
    )
    logs.configure("json", "error")
    for done in range(1, int(sys.argv[1]) + 1):
        await drain_once(config)
        print(done, flush=True)  # noqa: T201


if __name__ == "__main__":
    uvloop.run(main())
