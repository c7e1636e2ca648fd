"""What a server refuses arrives at the client as the same: status, class and limit."""

import grpc
import pytest

import histospec.client as client
from histospec.client.core.message_limits import ServerLimits
from histospec.client.errors import from_status
from histospec.protocol.refusals import draft_too_long, too_many
from histospec.server import errors as server

ARRIVES_AS = {
    server.InvalidRequest: client.InvalidRequest,
    server.LimitExceeded: client.LimitExceeded,
    server.Late: client.DeadlineExceeded,
    server.Unauthenticated: client.PermissionDenied,
    server.PermissionDenied: client.PermissionDenied,
    server.Unavailable: client.Unavailable,
    server.StoreError: client.Unavailable,  # the same request may succeed later
    server.StoreFull: client.LimitExceeded,
    server.Damaged: client.Unavailable,
    server.HistoSpecError: client.ServerError,
}


def test_every_error_of_a_server_arrives_as_its_counterpart() -> None:
    assert ARRIVES_AS.keys() >= server.STATUS.keys()
    for refused, arrives in ARRIVES_AS.items():
        told = from_status(server.status_of(refused("prompt: it is wrong")), "prompt: it is wrong", "History on a:1")
        assert (type(told), str(told)) == (arrives, "History on a:1: prompt: it is wrong")


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_every_status_is_an_error_of_the_client(code: grpc.StatusCode) -> None:
    assert isinstance(from_status(code, None, "History on a:1"), client.HistoSpecError)


@pytest.mark.parametrize("field", ["opens", "closes", "step.sessions", "responses"])
def test_a_client_reads_how_many_parts_a_server_takes(field: str) -> None:
    assert ServerLimits().refused(too_many(field, 9, 8)) == ServerLimits(batch=8)


def test_a_client_reads_how_long_drafts_a_server_gives() -> None:
    assert ServerLimits().refused(draft_too_long(257, 256)) == ServerLimits(draft=256)


@pytest.mark.parametrize("sentence", ["prompt: 21 tokens are more than the limit of 20", "step: over the limit of 9"])
def test_other_sentences_name_no_limit(sentence: str) -> None:
    assert ServerLimits().refused(sentence) == ServerLimits()
