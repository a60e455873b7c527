"""What a control plane takes from its callers: sizes, counts and times (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from meshnet.limits import check_limits

__all__ = ["DEFAULT_LIMITS", "ControlLimits"]


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Bounds of both faces; times are in seconds.

    Attributes:
        max_connections: of the JSON face, open at once; one more is closed.
        max_head_line_bytes: of the request line and of each field; 431 above.
        max_head_lines: fields of a request; 400 above.
        max_body_bytes: of a request of the JSON face; 413 above.
        max_message_bytes: of a message on the gRPC face; RESOURCE_EXHAUSTED above.
        max_metadata_bytes: of a call's metadata on the gRPC face.
        max_streams: calls at once on a connection of the gRPC face; more wait.
        head_timeout_s: from a connection's begin to its first head's end, and for a
            handshake, on both faces.
        body_timeout_s: for a body to arrive; 408 after it.
        idle_timeout_s: between an answer and the end of the next head on the JSON face.
        write_timeout_s: for which a client may read nothing while an answer waits for it.
        grpc_idle_timeout_s: for which a connection of the gRPC face may have no call.
    """

    max_connections: int = 1024
    max_head_line_bytes: int = 8190
    max_head_lines: int = 64
    max_body_bytes: int = 1 << 20
    max_message_bytes: int = 4 << 20
    max_metadata_bytes: int = 16 << 10
    max_streams: int = 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
    grpc_idle_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be.

        Raises:
            ConfigError: naming the limit.
        """
        check_limits(asdict(self))


DEFAULT_LIMITS: Final = ControlLimits()
