"""Drafts in SGLang's scheduler: opens a session for every request, drafts in every step, commits finished responses.

A step of the scheduler is: choose the batch, fill the places, forward, process the results, send outputs. The adapter
sends the new tokens before SGLang sends its outputs. There SGLang has cut a response exactly (stop tokens, stop
strings, lengths), and sending the outputs hides the round trip. The adapter receives drafts when the NGRAM worker fills
the places of the next batch.

All places of a request are verified in any case, so a draft is as long as they are: its tokens cost nothing more.

A failure here never stops the engine: it is logged, and the requests go on without drafts.
"""

import logging
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from histospec.client import Draft, DraftClient
from histospec.client.engines.greeting import greet
from histospec.client.engines.harmless import Harmless
from histospec.client.engines.options import ONE_TOKEN, read_options, why_no_rollout
from histospec.client.engines.reporting import MinuteReport
from histospec.client.engines.sessions import RequestSessions, known
from histospec.client.engines.versions import WeightVersions
from histospec.client.sglang import places
from histospec.client.sglang.interface import Req, ScheduleBatch, Scheduler

logger = logging.getLogger("histospec.sglang")

VERIFY_COST = 0.0  # of one more token of a draft


class SchedulerDrafts:
    """The drafts of one scheduler. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Connects to the server. Raises ValueError if HistoSpec's own configuration cannot work."""
        self.places: int = scheduler.draft_worker.draft_token_num
        branches = scheduler.server_args.speculative_ngram_max_bfs_breadth > 1
        client = DraftClient()
        greet(client, self.places - 1, "speculative_num_draft_tokens - 1")
        self._vocabulary: int = scheduler.model_config.vocab_size
        self._sessions = RequestSessions(client, self.places - 1, runners_up=branches)
        self._sessions.verify_cost = VERIFY_COST
        self._harmless = Harmless(self._forget)
        self._versions = WeightVersions()
        self._drafts: dict[str, Draft] = {}  # those that wait for a step of their request
        self._filled: dict[str, int] = {}  # how many tokens of the server the current batch verifies
        self._minute = MinuteReport()
        self._stepped = -float("inf")  # when the last step ended
        self._report_rest = weakref.finalize(self, _report_rest, self._minute)

    def queued(self, req: Req) -> None:
        """Opens the session of a request that has joined the queue. Retracted requests join it again."""
        with self._harmless("open"):
            if self._sessions.sent(req.rid) is None and req.to_finish is None and not req.finished():
                self._open(req)

    def choosing(self) -> None:
        """Announces new sessions before SGLang chooses a batch, so that the server looks them up during the prefill."""
        with self._harmless("announce", forget=True):
            self._sessions.announce()

    def drafts(self, batch: ScheduleBatch) -> NDArray[np.int64]:
        """Returns what fills the places of a batch's requests in this step, see `places.choose`."""
        waited = -time.perf_counter()
        with self._harmless("receive", forget=True):
            received = self._sessions.collect()
            for name, draft in received.items():
                if (one := known(draft, self._vocabulary)) is None:
                    self._drafts.pop(name, None)
                else:
                    self._drafts[name] = one
            waited += time.perf_counter()
            drafts = [self._drafts.pop(req.rid, None) for req in batch.reqs]
            self._minute.received(waited, len(received), [[] if d is None else d.tokens.tolist() for d in drafts])
            chosen = places.choose(drafts, self.places, self._vocabulary)
            filled = (chosen[0] != places.NONE).sum(1).tolist()
            self._filled = {req.rid: count for req, count in zip(batch.reqs, filled, strict=True) if count}
            return chosen
        return places.choose([None] * len(batch.reqs), self.places, self._vocabulary)

    def processed(self, reqs: Sequence[Req]) -> None:
        """Sends the new tokens of requests that a step has computed, and commits the responses that ended."""
        with self._harmless("send", forget=True):
            came = list(self._came(reqs))
            self._report([tokens for _, tokens in came])
            self._sessions.ask({req.rid: tokens for req, tokens in came if not req.finished()}, VERIFY_COST)
            for req, _ in came:
                if req.finished():
                    self._finish(req)
            self._sessions.settle()

    def aborted(self, req: Req) -> None:
        """Closes the session of a request that is aborted while no forward pass computes it."""
        with self._harmless("close", forget=True):
            self._sessions.finish(req.rid, list(req.output_ids), self._versions.current, whole=False)
            self._drafts.pop(req.rid, None)
            self._sessions.settle()

    def new_weights(self, version: str | None) -> None:
        """Notes new weights, and their version if they have one."""
        with self._harmless("read the version of the weights"):
            if version is None:
                self._versions.reset()
            else:
                self._versions.name(version)

    def shut_down(self) -> None:
        """Reports the last steps, sends the last commits and ends the client."""
        with self._harmless("shut down"):
            self._report_rest()
            self._sessions.shut_down()

    def _open(self, req: Req) -> None:
        if req.input_embeds is not None or not len(req.origin_input_ids_unpadded):
            return
        prompt = list(req.origin_input_ids_unpadded)
        options = read_options(req.sampling_params.custom_params, len(prompt))
        why = why_no_rollout(
            options,
            prefills=req.sampling_params.max_new_tokens == 0,
            scores_prompt=req.return_logprob and 0 <= req.logprob_start_len < len(prompt) - 1,
            one_token=req.sampling_params.max_new_tokens == 1,
        )
        if why == ONE_TOKEN and self._sessions.client.continues(prompt):
            why = ""  # the last token of a response that was aborted
        if why:
            self._minute.left_out(why)
        else:
            self._sessions.begin(req.rid, prompt, options)

    def _came(self, reqs: Sequence[Req]) -> Iterator[tuple[Req, Sequence[int]]]:
        """Yields requests with a session, and the tokens that it was not sent yet, as SGLang has cut them."""
        for req in reqs:
            sent = self._sessions.sent(req.rid)
            if sent is not None and (req.finished() or len(req.output_ids) > sent):
                yield req, list(req.output_ids_through_stop[sent:])

    def _finish(self, req: Req) -> None:
        whole = req.finished_reason.to_json()["type"] != "abort"
        self._sessions.finish(req.rid, list(req.output_ids_through_stop), self._versions.current, whole)
        self._drafts.pop(req.rid, None)
        if whole:
            self._versions.wrote()

    def _report(self, came: list[Sequence[int]]) -> None:
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        self._minute.stepped(seconds, came, sum(self._filled.values()))
        self._filled = {}
        if (line := self._minute.line(now)) is not None:
            logger.info("%s", line)

    def _forget(self) -> None:
        self._sessions.forget()
        self._drafts.clear()
        self._filled = {}


def _report_rest(minute: MinuteReport) -> None:
    """Logs the steps since the last minute's line."""
    if (line := minute.rest()) is not None:
        logger.info("%s", line)
