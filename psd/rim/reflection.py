"""gRPC's reflection service, by which tools such as grpcurl find services and messages: v1, and v1alpha for older tools.

They differ only in the name of their package, and grpcio-reflection has only v1alpha. Must not know what is served.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from typing_extensions import override

from psd.rim.pace import Pace
from psd.rim.strangers import CALLS_MAX, Strangers

_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"


class Reflection(reflection.ReflectionServicer):
    """Answers under both names, with a common limit on streams.

    Args:
        service_names: names of the other services. pace: limits how often new streams may begin.
    """

    def __init__(self, service_names: tuple[str, ...], pace: Pace) -> None:
        self._names = (f"{_V1}.ServerReflection", f"{_ALPHA}.ServerReflection")
        super().__init__((*service_names, *self._names), _Pool())
        self._pace = pace
        self._streams = Strangers(CALLS_MAX)

    def handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Handlers for both services."""
        method = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in self._names)

    @override
    def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:
        """Answer, like any other stranger's call, at a pace."""
        self._pace.wait(context)
        answers: Any = super().ServerReflectionInfo(request_iterator, context)
        stranger = object()
        self._streams.enter(stranger, context.cancel)
        try:
            yield from answers
        except grpc.RpcError:
            return
        finally:
            self._streams.leave(stranger)


class _Pool:
    """The process's descriptors, and those of v1, which are kept apart: a library may register its own."""

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name, file.package = file.name.replace("v1alpha", "v1"), _V1
        for message in file.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = field.type_name.replace(_ALPHA, _V1)
        for method in file.service[0].method:
            method.input_type = method.input_type.replace(_ALPHA, _V1)
            method.output_type = method.output_type.replace(_ALPHA, _V1)
        self._v1 = descriptor_pool.DescriptorPool()
        self._v1.Add(file)
        self._others: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    def FindFileByName(self, name: str) -> Any:  # noqa: N802, protobuf's name
        """The descriptor of the file with this name, from v1's own or from the process's."""
        return (self._v1 if name.startswith("grpc_reflection/v1/") else self._others).FindFileByName(name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802, protobuf's name
        """The descriptor of the file with this service or message, from v1's own or from the process's."""
        return (self._v1 if symbol.startswith(f"{_V1}.") else self._others).FindFileContainingSymbol(symbol)
