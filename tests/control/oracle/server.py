"""An echo server for every rule of google.api.http: answers what it received."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc_tools
from google.api import annotations_pb2, httpbody_pb2
from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    field_mask_pb2,
    json_format,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from grpc_tools import protoc

HERE = Path(__file__).parent
IMPORTED = (  # by oracle.proto: importing them puts them into the pool
    annotations_pb2,
    duration_pb2,
    field_mask_pb2,
    httpbody_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
CODES = {code.value[0]: code for code in grpc.StatusCode}


def load_service(folder: Path) -> Any:
    """Compile oracle.proto into `folder` and give the service's descriptor."""
    out = folder / "oracle.binpb"
    wheels = Path(httpbody_pb2.__file__).parents[2]
    bundled = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{HERE / 'proto'}",
            f"-I{wheels}",
            f"-I{bundled}",
            f"--descriptor_set_out={out}",
            "oracle/v1/oracle.proto",
        ]
    )
    assert status == 0
    pool = descriptor_pool.Default()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName("oracle.v1.OracleService")


class Oracle:
    """Handlers of the service, by method name; all others echo."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._response = message_factory.GetMessageClass(
            service.methods_by_name["GetShelf"].output_type
        )
        self.received: list[Any] = []
        self.started = asyncio.Event()
        self.ended: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    def handler(self) -> grpc.GenericRpcHandler:
        handlers = {}
        for method in self._service.methods:
            own = getattr(self, method.name, None) or self._echo(method.name)
            arity = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = arity(
                own,
                request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
        return grpc.method_handlers_generic_handler(self._service.full_name, handlers)

    def _answer(self, rpc: str, request: Any, **fields: Any) -> Any:
        self.received.append(request)
        text = json.dumps(
            json_format.MessageToDict(request, preserving_proto_field_name=True), sort_keys=True
        )
        return self._response(rpc=rpc, request=text, big=2**53 + 1, snake_case_name="s", **fields)

    def _echo(self, rpc: str) -> Any:
        async def echo(request: Any, _context: Any) -> Any:
            return self._answer(rpc, request)

        return echo

    async def Fail(self, request: Any, context: Any) -> Any:  # noqa: N802
        detail = any_pb2.Any()
        detail.Pack(
            error_details_pb2.ErrorInfo(reason="TEST", domain="oracle", metadata={"k": "v"})
        )
        details = [detail] if request.flag else []
        status = status_pb2.Status(code=request.code, message="boom é", details=details)
        await context.send_initial_metadata((("x-init", "i1"),))
        context.set_trailing_metadata((("x-trail", "t1"),))
        if request.flag:
            await context.abort_with_status(rpc_status.to_status(status))
        await context.abort(CODES[request.code], "boom é")

    async def Slow(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.add_done_callback(lambda c: self.ended.put_nowait(("Slow", c.cancelled())))
        self.started.set()
        await asyncio.sleep(request.millis / 1000)
        return self._answer("Slow", request)

    async def Meta(self, request: Any, context: Any) -> Any:  # noqa: N802
        metadata = {
            key: value if isinstance(value, str) else f"bin:{value.hex()}"
            for key, value in context.invocation_metadata()
        }
        await context.send_initial_metadata(
            (("x-init", "i1"), ("x-multi", "a"), ("x-multi", "b"), ("x-bin-bin", b"\x00\x01"))
        )
        context.set_trailing_metadata((("x-trail", "t1"),))
        return self._answer("Meta", request, metadata=metadata)

    async def Stream(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.add_done_callback(lambda c: self.ended.put_nowait(("Stream", c.cancelled())))
        self.started.set()
        for index in range(request.count):
            if request.fail_after and index >= request.fail_after:
                await context.abort(grpc.StatusCode.ABORTED, "mid-stream")
            yield self._response(rpc="Stream", big=index)
            await asyncio.sleep(request.millis / 1000)
        if request.code:
            await context.abort(CODES[request.code], "end")

    async def Download(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self.received.append(request)
        return httpbody_pb2.HttpBody(content_type="text/plain", data=b"raw bytes")
