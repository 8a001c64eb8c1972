"""The registry of errors: every class has a gRPC status, and arrives at the other side as itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from psd.contract.errors import DETAIL_KEY, REASON_KEY, PsdError, error_from, reasons
from psd.rim.calls import abort


@pytest.fixture(scope="module")
def raising():
    """A server whose one method raises the error that the request names; the call of it."""

    def call(request, context):
        abort(context, reasons()[request.decode()](f"what went wrong: {request.decode()}, ü", rank=3))

    handler = grpc.method_handlers_generic_handler("t", {"raise": grpc.unary_unary_rpc_method_handler(call)})
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_unary("/t/raise")
        server.stop(None).wait()


@pytest.mark.parametrize("name", sorted(reasons()))
def test_every_error_has_a_status_and_survives_the_wire(name, raising):
    """Each class of the registry travels through a real call: status by its code, class by its reason, message and detail."""
    with pytest.raises(grpc.RpcError) as caught:
        raising(name.encode(), timeout=10)

    status = caught.value
    trailing = dict(status.trailing_metadata())
    error = error_from(trailing[REASON_KEY], status.details(), json.loads(trailing[DETAIL_KEY]))
    assert status.code().name == reasons()[name].code
    assert type(error) is reasons()[name]
    assert (str(error), error.detail) == (f"what went wrong: {name}, ü", {"rank": 3})


def test_a_code_is_never_ok_or_unknown():
    """Every registered class says what the caller should do."""
    for name, kind in reasons().items():
        assert kind.code in grpc.StatusCode.__members__, name
        assert kind.code not in ("OK", "UNKNOWN"), name
        assert kind.__doc__, name


def test_a_reason_of_a_newer_peer_is_a_plain_error():
    """A class that this version does not know is still an error with its message."""
    error = error_from("FromTheFuture", "what", {})

    assert type(error) is PsdError
    assert str(error) == "what"


def test_reasons_are_unique_and_private_errors_stay_inside():
    """Two classes of one name cannot exist; one whose name begins with an underscore is not in the registry."""
    with pytest.raises(TypeError, match="Draining"):
        type("Draining", (PsdError,), {})
    type("_Inside", (PsdError,), {})

    assert "_Inside" not in reasons()
