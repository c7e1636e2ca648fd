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
import uvloop

from histospec.server.app import serve
from histospec.server.logs import lines as logs
from histospec.server.settings.addresses import Address
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc
from tests.support.ports import free_port
from tests.support.wires import Wire

STREAMS = 2


async def step_for_ever(endpoint: str, begun: asyncio.Event) -> None:
    """A stream that never ends its session, until it is cut off."""
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = rpc.DraftServiceStub(channel)  # the stubs know it without asyncio alone
        call = stub.Draft(wait_for_ready=True)
        try:
            await call.write(pb.DraftRequest(opens=[Wire.open(1)]))
            for position in range(1 << 20):
                await call.write(pb.DraftRequest(step=Wire.step([1], [[3]], [position], max_tokens=4)))
                await call.read()
                begun.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def drain_once(config: Config) -> None:
    serving = asyncio.ensure_future(serve(config))
    begun = [asyncio.Event() for _ in range(STREAMS)]
    streams = [asyncio.ensure_future(step_for_ever(str(config.listen), event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    await asyncio.gather(*streams)


async def main() -> None:
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
