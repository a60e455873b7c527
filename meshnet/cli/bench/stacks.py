"""Clients of the stacks that meshnet is compared with: one round trip of a tensor each."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy.typing as npt

from meshnet.cli.bench.echo import (
    GRPC_METHOD,
    GRPC_OPTIONS,
    RAW_SIZE,
    ZMQ_COPY_BYTES,
    EchoStack,
    pack_json,
    receive_exactly,
    unpack_json,
)
from meshnet.dtypes import Body, view_bytes

if TYPE_CHECKING:
    import grpc
    import grpc.aio
    from google.protobuf.wrappers_pb2 import BytesValue

__all__ = [
    "CLIENTS",
    "RawSocket",
    "Transport",
    "time_round_trips",
]

_TIMEOUT_S: Final = 120.0


class Transport(Protocol):
    """Sends a tensor to its echo server and receives it again."""

    async def round_trip(self) -> Body:
        """Send and receive once; gives the bytes received."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class RawSocket:
    """A blocking TCP socket and one preallocated buffer: the limit."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        host, port = address.split(":")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._body = view_bytes(tensor)
        self._received = memoryview(bytearray(len(self._body)))
        self._sock.sendall(RAW_SIZE.pack(len(self._body)))

    async def round_trip(self) -> Body:
        """Send and receive, blocking the event loop."""
        self._sock.sendall(self._body)
        receive_exactly(self._sock, self._received)
        return self._received

    async def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class _Aiohttp:
    """aiohttp as its tutorials use it: the body as bytes, no header of ours, no check."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        import aiohttp

        self._url = f"http://{address}/forward"
        self._body = tensor.tobytes()
        self._session = aiohttp.ClientSession()

    async def round_trip(self) -> Body:
        """Post the body and read the answer's."""
        async with self._session.post(self._url, data=self._body) as answer:
            return await answer.read()

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


class _Base64Json:
    """A tensor in base64 in JSON over aiohttp, encoded and decoded at both ends."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        import aiohttp

        self._url = f"http://{address}/json"
        self._tensor = tensor
        self._session = aiohttp.ClientSession()

    async def round_trip(self) -> Body:
        """Encode, post, and decode the answer."""
        headers = {"Content-Type": "application/json"}
        data = pack_json(self._tensor)
        async with self._session.post(self._url, data=data, headers=headers) as answer:
            return view_bytes(unpack_json(await answer.text()))

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


class _Grpc:
    """A unary gRPC call with a message of one bytes field, blocking."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        import grpc
        from google.protobuf.wrappers_pb2 import BytesValue

        self._message = BytesValue
        self._body = tensor.tobytes()
        self._channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
        self._call: grpc.UnaryUnaryMultiCallable[BytesValue, BytesValue]
        self._call = self._channel.unary_unary(
            GRPC_METHOD,
            request_serializer=BytesValue.SerializeToString,
            response_deserializer=BytesValue.FromString,
        )

    async def round_trip(self) -> Body:
        """Call, blocking the event loop."""
        return self._call(self._message(value=self._body), timeout=_TIMEOUT_S).value

    async def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class _GrpcAio:
    """The same call by gRPC's asyncio interface, to a server of the same."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        import grpc.aio
        from google.protobuf.wrappers_pb2 import BytesValue

        self._message = BytesValue
        self._body = tensor.tobytes()
        self._channel = grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)
        self._call: grpc.aio.UnaryUnaryMultiCallable[BytesValue, BytesValue]
        self._call = self._channel.unary_unary(
            GRPC_METHOD,
            request_serializer=BytesValue.SerializeToString,
            response_deserializer=BytesValue.FromString,
        )

    async def round_trip(self) -> Body:
        """Call and await the answer."""
        answer = await self._call(self._message(value=self._body), timeout=_TIMEOUT_S)
        return answer.value

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class _Zmq:
    """A pyzmq REQ socket, blocking, without copies where these would cost more."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        import zmq

        self._body = view_bytes(tensor)
        self._copy = len(self._body) <= ZMQ_COPY_BYTES
        self._sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._sock.connect(f"tcp://{address}")

    async def round_trip(self) -> Body:
        """Send and receive, blocking the event loop."""
        self._sock.send(self._body, 0, copy=self._copy)
        received: memoryview = self._sock.recv(copy=False).buffer
        return received

    async def close(self) -> None:
        """Close the socket."""
        self._sock.close()


CLIENTS: Final[dict[EchoStack, Callable[[str, npt.NDArray[Any]], Transport]]] = {
    EchoStack.RAW: RawSocket,
    EchoStack.AIOHTTP: _Aiohttp,
    EchoStack.GRPC: _Grpc,
    EchoStack.GRPC_AIO: _GrpcAio,
    EchoStack.ZMQ: _Zmq,
    EchoStack.BASE64_JSON: _Base64Json,
}
"""What connects to each echo server, given its address and the tensor to send."""


async def time_round_trips(transport: Transport, count: int, pause_s: float) -> list[float]:
    """Give the seconds of `count` round trips, each after a rest of `pause_s`."""
    seconds = []
    for _ in range(count):
        if pause_s:
            await asyncio.sleep(pause_s)
        started = time.perf_counter()
        await transport.round_trip()
        seconds.append(time.perf_counter() - started)
    return seconds
