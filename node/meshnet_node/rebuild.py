"""Computes a lost cache again: feeds a session's journal to the hops that replace the lost ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.dtypes import BFLOAT16
from meshnet.grammar import Phase, Want
from meshnet.operations import Rebuild, RebuildMode
from meshnet.plane.caller import Caller
from meshnet.plane.hop_client import HopClient
from meshnet.wire import ChunkHeader
from meshnet_node.journal import Journal

__all__ = ["feed", "regroup"]

_CHUNK_TOKENS: Final = 128
_MAX_IN_FLIGHT: Final = 8
_NONE: Final = Want("none")


def feed(
    journal: Journal, asked: Rebuild, client: HopClient, *, timeout_s: float, caller: Caller
) -> None:
    """Send what a journal holds as chunks, in order, one more in flight than there are hops.

    Args:
        journal: of the session, in whose turn this is.
        asked: what to feed, and where.
        client: for the first replacement.
        timeout_s: for one chunk.
        caller: the feeding ends when it leaves.

    Raises:
        MeshError: JOURNAL_LOST, what a replacement answered instead, or its failure.
        CallerGoneError: `caller` left.
    """
    pieces: Iterator[npt.NDArray[Any]] = journal.read(asked.position)
    sizes = journal.borders(asked.position)
    if asked.mode is RebuildMode.FAST:
        pieces = regroup(pieces, _CHUNK_TOKENS)
        sizes = [_CHUNK_TOKENS] * (-(-asked.position // _CHUNK_TOKENS))
    in_flight: deque[tuple[Future[Answer], Caller]] = deque()
    first, window = asked.route[0], min(len(asked.route) + 1, _MAX_IN_FLIGHT)

    def send(header: ChunkHeader, piece: npt.NDArray[Any], sender: Caller) -> Answer:
        return client.forward(
            first.address, first.node, header, piece, timeout_s=timeout_s, caller=sender
        )

    def end_all() -> None:
        for _, sender in list(in_flight):
            sender.leave()

    with ThreadPoolExecutor(window, thread_name_prefix="rebuild") as pool:
        try:
            with caller.waking(end_all):
                for header, piece in _chunks(asked, pieces, len(sizes)):
                    if len(in_flight) >= window:
                        in_flight[0][0].result()
                        in_flight.popleft()
                    caller.check()
                    sender = Caller()
                    in_flight.append((pool.submit(send, header, piece, sender), sender))
                while in_flight:
                    in_flight[0][0].result()
                    in_flight.popleft()
        finally:
            end_all()


def regroup(pieces: Iterable[npt.NDArray[Any]], tokens: int) -> Iterator[npt.NDArray[Any]]:
    """Cut tensors ``[1, seq, hidden]`` anew, in order: each of `tokens`, the last of the rest."""
    waiting: list[npt.NDArray[Any]] = []
    num_waiting = 0
    for piece in pieces:
        waiting.append(piece)
        num_waiting += piece.shape[1]
        if num_waiting < tokens:
            continue
        joined = np.concatenate(waiting, axis=1)
        cut = num_waiting - num_waiting % tokens
        for start in range(0, cut, tokens):
            yield joined[:, start : start + tokens]
        waiting = [joined[:, cut:]] if cut < num_waiting else []
        num_waiting -= cut
    if waiting:
        yield np.concatenate(waiting, axis=1)


def _chunks(
    asked: Rebuild, pieces: Iterable[npt.NDArray[Any]], total: int
) -> Iterator[tuple[ChunkHeader, npt.NDArray[Any]]]:
    hop, position = asked.route[0], 0
    for index, piece in enumerate(pieces):
        header = ChunkHeader(
            shape=piece.shape,
            dtype=BFLOAT16,
            session=asked.session,
            chunk_index=index,
            chunk_total=total,
            position=position,
            layers=hop.layers,
            phase=Phase.PREFILL,
            want=_NONE,
            route=asked.route[1:],
            max_tokens=asked.max_tokens if position == 0 else None,
            epoch=asked.epoch,
            journal=True,
            grant=asked.grant,
        )
        yield header, piece
        position += piece.shape[1]
