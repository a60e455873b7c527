"""What a gateway takes from clients: sizes, counts and times, all in one place (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from meshnet.limits import check_limits

__all__ = ["DEFAULT_LIMITS", "GatewayLimits"]


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of the OpenAI endpoint; each is at least 1, times are in seconds.

    Attributes:
        max_connections: open at a time; one more is closed at once.
        max_requests: completions in progress, of all clients together; 503 above.
        max_running_choices: sessions that one request holds at a time; others wait.
        max_head_line_bytes: of each line of a request's head; 431 above.
        max_head_lines: lines of a request's head; 431 above.
        max_body_bytes: of a request, after any content coding; 413 above.
        max_json_depth: objects and arrays within each other; 400 above, as for all that follow.
        max_json_containers: objects and arrays in all.
        max_prompt_chars: of all prompts or messages of a request; its tokens are bounded by
            the model's context.
        max_choices: completions of a request, all prompts together.
        max_stops: stop strings.
        max_stop_chars: of each stop string.
        max_logit_biases: tokens with a bias.
        head_timeout_s: from a connection's begin, or a head's first byte, to the head's end.
        body_timeout_s: from a head's end to the body's end; 408 after it.
        idle_timeout_s: between an answer and the next request on its connection.
        write_timeout_s: for which a client may read nothing while an answer waits for it;
            its connection and its sessions end then.
    """

    max_connections: int = 1024
    max_requests: int = 256
    max_running_choices: int = 4
    max_head_line_bytes: int = 8190
    max_head_lines: int = 64
    max_body_bytes: int = 8 << 20
    max_json_depth: int = 32
    max_json_containers: int = 100_000
    max_prompt_chars: int = 1_000_000
    max_choices: int = 128
    max_stops: int = 4
    max_stop_chars: int = 500
    max_logit_biases: int = 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be.

        Raises:
            ConfigError: naming the limit.
        """
        check_limits(asdict(self))


DEFAULT_LIMITS: Final = GatewayLimits()
