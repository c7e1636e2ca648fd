"""`histospec.v1.DraftService`: connects RPCs with the engine and the store."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any, Protocol, get_args

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from histospec.native import Engine
from histospec.protocol.names import LIMITS
from histospec.server.errors import Crowded, LimitExceeded, Unavailable
from histospec.server.history.history import History
from histospec.server.history.namespaces import look_alikes
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc import encoded, slices, wire
from histospec.server.rpc.answering import SMALL_ANSWER, Answering
from histospec.server.rpc.arrivals import PAUSE_SECONDS, caller
from histospec.server.rpc.draft_stream import DraftStream
from histospec.server.rpc.export import Exports
from histospec.server.security.access import Access, Permit, Right
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Problem
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc

STREAMS, STREAMS_EACH = 2048, 1024
"""Draft streams at a time, of all callers and of one token, or of one host without tokens. A worker needs one."""
MOST_SIMILAR = MOST_SHARED = 8
"""Other namespaces in the answer to Inspect."""
INSPECTED = (
    "lookups_hit", "lookups_miss", "misnamed_lookups", "drafts_hit", "drafts_empty", "undrafted_tokens", "draft_tokens",
    "accepted_tokens", "generated_tokens",
)  # fmt: skip
"""Counters of the engine that the answer to Inspect has under the same names."""

Context = grpc.aio.ServicerContext[Any, Any]


class OfNamespace(Protocol):
    """A request that concerns one namespace."""

    namespace: str


class DraftService(pb_grpc.DraftServiceServicer):
    """All RPCs of one shard, as draft.proto describes them.

    They raise errors; the interceptor turns these into gRPC statuses.
    """

    def __init__(
        self, engine: Engine, history: History, metrics: Metrics, config: Config, access: Access, answering: Answering
    ) -> None:
        self._engine = engine
        self._history = history
        self._metrics = metrics
        self._config = config
        self._access = access
        self._answering = answering
        self._exports = Exports(history, answering)
        self._version = metadata.version("histospec")
        self._inspecting = ThreadPoolExecutor(1, thread_name_prefix="inspect")
        self.streams: set[DraftStream] = set()
        """The open Draft streams."""
        self._streams_of: Counter[str] = Counter()  # by caller
        self._paused: dict[str, float] = {}  # by caller: until when new streams of it are not read
        self._draining = False
        self.shards: list[ShardAddress] = []
        self.name = ""
        """The name of this shard."""
        self.listening: ShardAddress | None = None
        """This shard among them, if no --peers entry has its name."""

    def drain(self) -> None:
        """Refuses new streams, and ends each open one when its last session ends."""
        self._draining = True
        for stream in self.streams:
            stream.drain()

    async def Draft(  # type: ignore[override]  # gRPC's reader-writer style
        self, request_iterator: object, context: Context
    ) -> None:
        if self._draining:
            raise Unavailable("the server is draining; connect again")
        permit = self._permit(context)
        who = caller(permit, context)
        if len(self.streams) >= STREAMS or self._streams_of[who] >= STREAMS_EACH:
            self._metrics.caller_limits.labels("calls").inc()
            raise LimitExceeded(
                f"{self._streams_of[who]} Draft streams of this token or host, of {len(self.streams)} in all, are "
                f"open; the limits are {STREAMS_EACH} and {STREAMS}"
            )
        stream = DraftStream(
            self._engine, self._history, self._metrics, self._config, permit, context, self._answering,
            self._sessions_each,
        )  # fmt: skip
        self.streams.add(stream)
        self._streams_of[who] += 1
        try:
            await asyncio.sleep(self._paused.get(who, 0.0) - time.monotonic())
            with self._metrics.streams.track_inprogress():
                await stream.run()
        except Crowded:
            now = time.monotonic()
            self._paused = {paused: until for paused, until in self._paused.items() if until > now}
            self._paused[who] = now + PAUSE_SECONDS
            raise
        finally:
            # Sessions take memory until they are closed. Other streams must not be refused for it.
            stream.close().add_done_callback(lambda _: self._closed(stream, who))

    def _closed(self, stream: DraftStream, who: str) -> None:
        self.streams.discard(stream)
        self._streams_of[who] -= 1
        if not self._streams_of[who]:
            del self._streams_of[who]

    def _sessions_each(self) -> float:
        """Returns the average number of open sessions over streams that have any."""
        held = [stream.sessions for stream in self.streams if stream.sessions]
        return sum(held) / len(held) if held else 0.0

    def _permit(self, context: Context) -> Permit:
        return self._access.permit(dict(context.invocation_metadata() or ()))

    def _permitted(self, right: Right, request: OfNamespace, context: Context) -> Permit:
        """Returns the caller's permit. Raises InvalidRequest, PermissionDenied and Unauthenticated.

        Checks the name of the namespace first: what is refused later quotes it.
        """
        permit = self._permit(context)
        permit.require(right, wire.namespace("namespace", request.namespace))
        return permit

    async def Ingest(self, request: pb.IngestRequest, context: Context) -> pb.IngestResponse:
        permit = self._permitted("write", request, context)
        newest = self._history.epochs.newest(request.namespace)
        if len(request.responses) > slices.MANY:
            batch, _ = await self._history.threads.run("ingest", wire.ingest, request, self._config, newest)
        else:
            batch, _ = wire.ingest(request, self._config, newest)
        kept = await self._history.add(
            batch, context.peer(), explicit_epoch=request.HasField("epoch"), creator=permit.name
        )
        too_old = len(batch.records) - len(kept.records)
        return pb.IngestResponse(responses=len(kept.records), tokens=kept.tokens, too_old=too_old)

    async def History(  # type: ignore[override]  # the interceptor accepts what this returns
        self, request: pb.HistoryRequest, context: Context
    ) -> bytes | Callable[[], Awaitable[bytes]]:
        self._permitted("read", request, context)
        problem, _ = wire.problem("", request)
        get = partial(self._history.get, problem, request.limit, encode=encoded.history)
        try:
            return await get(room=SMALL_ANSWER)
        except LimitExceeded:
            return partial(get, room=self._config.max_message)

    async def PredictLength(self, request: pb.PredictLengthRequest, context: Context) -> pb.PredictLengthResponse:
        self._permitted("read", request, context)
        problem, prompt = wire.problem("", request)
        quantiles = wire.quantiles(request)
        answer = self._prediction(problem, prompt, request.generated, np.array(quantiles))
        answer.quantiles.extend(quantiles)
        return answer

    async def PredictLengths(self, request: pb.PredictLengthsRequest, context: Context) -> pb.PredictLengthsResponse:
        self._permitted("read", request, context)
        problems = await self._history.threads.run("predict", wire.expected, request, self._config)
        quantiles = wire.quantiles(request)
        asked, pacer = np.array(quantiles), slices.Pacer()
        answer = pb.PredictLengthsResponse(quantiles=quantiles)
        for problem, prompt, generated in problems:
            answer.predictions.append(self._prediction(problem, prompt, generated, asked))
            await pacer.after(slices.SESSION_WORK + prompt.size)
        return answer

    def _prediction(
        self, problem: Problem, prompt: NDArray[np.int32], generated: int, quantiles: NDArray[np.float64]
    ) -> pb.PredictLengthResponse:
        lengths, observations = self._engine.predict_length(
            problem.namespace, prompt, generated, quantiles, problem=problem.name or None
        )
        return pb.PredictLengthResponse(lengths=lengths.tolist(), observations=observations)

    async def Topology(self, request: pb.TopologyRequest, context: Context) -> pb.TopologyResponse:
        self._permit(context)
        config = self._config
        # The limits of messages, so that a client cuts its messages to fit.
        context.set_trailing_metadata(
            (
                (LIMITS["batch"], str(config.max_batch)),
                (LIMITS["message"], str(config.max_message)),
                (LIMITS["draft"], str(config.max_draft_tokens)),
                (LIMITS["sessions"], str(config.max_sessions_per_stream)),
            )
        )
        return pb.TopologyResponse(
            shards=[
                pb.Shard(name=shard.name, address=str(shard.address), listening=shard is self.listening)
                for shard in self.shards
            ]
        )

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectResponse:
        permit = self._permit(context)
        namespace = wire.namespace("namespace", request.namespace)
        # One at a time, and not in the threads of other calls.
        return await asyncio.get_running_loop().run_in_executor(self._inspecting, self._inspect, permit, namespace)

    def _inspect(self, permit: Permit, namespace: str) -> pb.InspectResponse:
        """Takes milliseconds with thousands of namespaces. Raises Unauthenticated."""
        config = self._config
        answer = pb.InspectResponse(
            shard=self.name,
            version=self._version,
            time=time.time(),
            limits=pb.Limits(
                batch=config.max_batch,
                message_bytes=config.max_message,
                draft_tokens=config.max_draft_tokens,
                sessions=config.max_sessions_per_stream,
            ),
            rights=[right for right in get_args(Right) if permit.allows(right, namespace)],
            loaded=self._history.loading.done.is_set(),
        )
        if "write" in answer.rights:
            answer.trouble = self._history.trouble
        names, columns, values, _ = self._engine.counters()
        if "read" in answer.rights and namespace in names:
            row = dict(zip(columns, values[names.index(namespace)].tolist(), strict=True))
            progress = self._history.epochs.progress(namespace)
            facts = pb.NamespaceFacts(
                problems=row["problems"],
                responses=row["history_responses"],
                sessions=row["sessions"],
                newest_epoch=progress.newest,
                behind=progress.behind,
                behind_epoch=progress.behind_epoch,
                model_draft_tokens=row["model.draft_tokens"],
                model_accepted_tokens=row["model.accepted_tokens"],
                **{name: row[name] for name in INSPECTED},
            )
            answer.facts.CopyFrom(facts)
            asked, known = self._engine.shared_prompts(namespace)
            for name in sorted(known, key=lambda name: (-known[name], name)):
                if len(answer.shared) < MOST_SHARED and permit.allows("read", name):
                    answer.shared.add(namespace=name, prompts=known[name], asked=asked)
        # Only names that the caller may read are compared, so that no others can crowd them out.
        readable = permit.allowed("read", names)
        answer.similar.extend(look_alikes(namespace, readable, MOST_SIMILAR))
        return answer

    async def DropNamespace(self, request: pb.DropNamespaceRequest, context: Context) -> pb.DropNamespaceResponse:
        self._permitted("admin", request, context)
        responses = await self._history.drop(request.namespace)
        for stream in self.streams:
            stream.forget(request.namespace)
        return pb.DropNamespaceResponse(responses=responses)

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        self._permitted("admin", request, context)
        epoch = wire.epoch("epoch", request.epoch)
        return pb.RewindResponse(responses=await self._history.rewind(request.namespace, epoch))

    async def Export(  # type: ignore[override]  # the writer style, see Draft
        self, request: pb.ExportRequest, context: Context
    ) -> None:
        if self._draining:
            raise Unavailable("the server is draining; retry when it is back")
        await self._exports.run(request, self._permit(context), context, self.name, lambda: self._draining)

    async def Import(self, request: pb.ImportRequest, context: Context) -> pb.ImportResponse:
        permit = self._permitted("admin", request, context)
        problems = await self._history.threads.run("import", wire.imported, request, self._config)
        added = await self._history.import_lacking(request.namespace, problems, request.estimator, permit.name)
        return pb.ImportResponse(**added._asdict())
