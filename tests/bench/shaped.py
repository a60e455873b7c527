"""One link of a set bandwidth, and bodies sent over it encoded in every way, side by side.

Run by `tests.bench.adaptive` as a process of its own, in a network namespace where its loopback
can be shaped with tbf, else with TCP's own pacing. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from meshnet.adaptive import EncodingChooser
from meshnet.cli.bench.measure import median_of
from meshnet.codec import ENCODINGS, decompress
from meshnet.compression import CompressionPolicies, CompressionResult
from tests.bench.codec import ACTIVATIONS, widen_channels

CONTENDERS: Final = ("raw", *ENCODINGS, "adaptive")
_HEAD: Final = struct.Struct("<BIII")  # encoding, bytes of the tensor, width, bytes of the body
_DECODE_S: Final = struct.Struct("<d")
_PACING: Final = getattr(socket, "SO_MAX_PACING_RATE", 47)
_MTU: Final = 65_536
_BURST_BYTES: Final = 66_000
"""Little more than a packet: what the bucket holds passes unshaped, at every body's start."""
_WARM_UP: Final = 3
_SHORT_BYTES: Final = 1024


class Sender:
    """The sending end: encodes, sends, and waits until the receiver has decoded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, result: CompressionResult, width: int) -> tuple[float, float]:
        """Send a body; gives the seconds until it was decoded, and those of the decoding."""
        code = 0 if result.encoding is None else 1 + ENCODINGS.index(result.encoding)
        started = time.perf_counter()
        head = _HEAD.pack(code, result.input_bytes, width, result.output_bytes)
        self._connection.sendall(head)
        self._connection.sendall(result.body)
        answer = self._connection.recv(_DECODE_S.size, socket.MSG_WAITALL)
        seconds = time.perf_counter() - started
        return seconds, _DECODE_S.unpack(answer)[0]


def receive(address: str) -> None:
    """Run the receiving end until the connection ends."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(head := connection.recv(_HEAD.size, socket.MSG_WAITALL)) == _HEAD.size:
            code, num_bytes, width, length = _HEAD.unpack(head)
            body = np.empty(length, np.uint8).data
            at = 0
            while at < length:
                at += connection.recv_into(body[at:])
            started = time.perf_counter()
            decompress(ENCODINGS[code - 1] if code else None, body, num_bytes, width)
            connection.sendall(_DECODE_S.pack(time.perf_counter() - started))


def measure(
    sender: Sender, body: memoryview, width: int, rates: list[float], shape: Callable[[float], None]
) -> dict[str, object]:
    """Send `body` once at each of `rates` by each contender; in any order."""
    choosers = {
        name: _chooser({"ENCODING": name} if name in ENCODINGS else {})
        for name in CONTENDERS
        if name != "raw"
    }
    choosers["raw"] = _chooser({"ENABLED": "off"})
    seconds: dict[str, dict[float, list[float]]] = {name: {} for name in CONTENDERS}
    chosen: Counter[str] = Counter()
    short = memoryview(bytes(_SHORT_BYTES))
    rate = 0.0
    rng = random.Random(0)
    for number, wanted in enumerate([rates[0]] * _WARM_UP + rates):
        if wanted != rate:
            shape(wanted)
            rate = wanted
        took: dict[str, float] = {}
        # Any order: what comes after an encoder finds its data no longer in the caches.
        for name in rng.sample(CONTENDERS, len(CONTENDERS)):
            chooser = choosers[name]
            _send(sender, chooser, short, width)
            started = time.perf_counter()
            what = _send(sender, chooser, body, width)
            took[name] = time.perf_counter() - started
            if name == "adaptive" and number >= _WARM_UP:
                chosen[what] += 1
        if number >= _WARM_UP:
            for name, value in took.items():
                seconds[name].setdefault(rate, []).append(value)
    return {
        "body_bytes": len(body),
        "bodies": len(rates),
        "total_s": {
            name: sum(sum(values) for values in by_rate.values())
            for name, by_rate in seconds.items()
        },
        # What other programs did to single bodies does not count; see the README.
        "typical_s": {
            name: sum(len(values) * median_of(values) for values in by_rate.values())
            for name, by_rate in seconds.items()
        },
        "chosen": dict(chosen),
    }


def _send(sender: Sender, chooser: EncodingChooser, body: memoryview, width: int) -> str:
    """Plan, encode, send and learn, as the plane does; gives what was chosen and why."""
    plan = chooser.choose(body, "prefill", width=width, accepted=ENCODINGS)
    result = plan.apply(body, time.perf_counter)
    chooser.record(plan, result)
    seconds, decode_s = sender.send(result, width)
    chooser.record_sent(result, seconds, decode_s if result.encoding else None)
    return f"{result.encoding or 'raw'} ({plan.reason})"


def _chooser(overrides: dict[str, str]) -> EncodingChooser:
    prefix = "MESHNET_COMPRESSION_LAN_PREFILL_"
    variables = {prefix + name: value for name, value in overrides.items()}
    return EncodingChooser(CompressionPolicies(overrides=variables))


def _raise_loopback() -> None:
    command = ("ip", "link", "set", "lo", "up", "mtu", str(_MTU))
    subprocess.run(command, check=True, capture_output=True)


def _shape_loopback(bits_per_s: float) -> None:
    """Set the bandwidth of this namespace's loopback."""
    rate = ("rate", f"{int(bits_per_s)}bit", "burst", str(_BURST_BYTES), "latency", "400ms")
    command = ("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *rate)
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def _connected() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        command = [sys.executable, "-m", "tests.bench.shaped", "--receive", f"{host}:{port}"]
        process = subprocess.Popen(command)
        try:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield connection
        finally:
            if process.wait(60):
                raise RuntimeError(f"the receiver ended with exit code {process.returncode}")


def main() -> None:
    """Measure, or be the receiver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive", metavar="HOST:PORT")
    parser.add_argument("--namespace", action="store_true", help="shape the loopback with tbf")
    parser.add_argument("--trial", action="store_true", help="see if loopback can be shaped")
    parser.add_argument("--rates", help="Mbit/s and bodies at it, as 100x20,10000x40")
    parser.add_argument("--width", type=int, help="of 128 rows")
    options = parser.parse_args()
    if options.trial:
        _raise_loopback()
        _shape_loopback(1e9)
        return
    if options.receive:
        receive(options.receive)
        return
    bits = widen_channels(
        [np.load(path, allow_pickle=False) for path in sorted(ACTIVATIONS.glob("*_prefill_*.npy"))],
        options.width,
    )
    rates = [
        float(rate) * 1e6
        for rate, count in (item.split("x") for item in options.rates.split(","))
        for _ in range(int(count))
    ]
    if options.namespace:
        _raise_loopback()
    with _connected() as connection:

        def pace(bits_per_s: float) -> None:
            connection.setsockopt(socket.SOL_SOCKET, _PACING, int(bits_per_s / 8))

        shape = _shape_loopback if options.namespace else pace
        found = measure(Sender(connection), memoryview(bits.tobytes()), options.width, rates, shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
