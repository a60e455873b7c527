"""What the connections of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshnet.adaptive import EncodingChooser
from meshnet.credentials import Credentials
from meshnet.plane.handler import PlaneHandler, PlaneLimits
from meshnet.plane.http1 import RequestHead
from meshnet.plane.memo import POSITION, HeadMemo
from meshnet.plane.reply import ReplyHeads
from meshnet.wire import ChunkHeader

__all__ = ["Service"]


@dataclass(slots=True)
class Service:
    """What the connections of one server share.

    Attributes:
        handler: computes.
        chooser: decides which answers are compressed; their links are not measured.
        limits: granted to callers.
        tls: credentials; None where connections are plain.
        closing: the server goes away, and each answer is its connection's last.
        chunks: heads of chunks read before.
        heads: writes those of replies.
    """

    handler: PlaneHandler
    chooser: EncodingChooser
    limits: PlaneLimits
    tls: Credentials | None = None
    closing: bool = False
    chunks: HeadMemo[tuple[RequestHead, ChunkHeader]] = field(
        default_factory=lambda: HeadMemo(POSITION)
    )
    heads: ReplyHeads = field(default_factory=ReplyHeads)
