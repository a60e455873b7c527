"""When an activation body is worth compressing: fixed thresholds by route and phase (pure).

The floor under `meshnet.adaptive`, and the manual mode where a policy names its encoding. What
zstd gives on activations is about 1.27, measured over 1,620 prefill chunks of two decoder
families: the entropy of their exponents, not zeros or repeats. Thresholds therefore weigh bytes
saved against CPU time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from meshnet.codec import ENCODINGS, compress, decompress_within
from meshnet.dtypes import Body
from meshnet.errors import Code, WireError
from meshnet.wire import DEFAULT_LIMITS
from meshnet.zstd import MAX_LEVEL

__all__ = [
    "AUTO",
    "CompressionError",
    "CompressionPolicies",
    "CompressionPolicy",
    "CompressionResult",
    "compress_activation",
    "decompress_activation",
]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
_T = TypeVar("_T")

AUTO: Final = "auto"
_ZSTD: Final = "zstd"
_VARIABLE_PREFIX: Final = "MESHNET_COMPRESSION_"
_NAMES: Final = (
    "MIN_INPUT_BYTES",
    "MIN_SAVINGS_BYTES",
    "MIN_SAVINGS_RATIO",
    "LEVEL",
    "ENABLED",
    "ENCODING",
)


class CompressionError(WireError, ValueError):
    """A compressed body cannot be decoded within its bound; ``field`` is the header at fault."""


@dataclass(frozen=True)
class CompressionPolicy:
    """What must hold before a body is sent compressed.

    Attributes:
        min_input_bytes: shorter bodies are not tried.
        min_savings_bytes: fewer bytes saved than this, and the body goes raw.
        min_savings_ratio: a smaller share of the body saved than this, and it goes raw.
        level: zstd level, 0 (zstd's default, 3) to 22; values outside are taken to the
            nearer end. Negative levels exist in zstd and save nothing on activations.
        enabled: False sends every body raw.
        encoding: ``auto`` leaves the choice to `meshnet.adaptive`; a name of
            `meshnet.codec.ENCODINGS` is the manual mode: that one or raw, by the
            thresholds alone.
    """

    min_input_bytes: int
    min_savings_bytes: int = 4096
    min_savings_ratio: float = 0.05
    level: int = 1
    enabled: bool = True
    encoding: str = AUTO


class CompressionResult(NamedTuple):
    """A body as it goes on, and what was decided about it.

    Attributes:
        body: the very object given where nothing was coded.
        encoding: of `body` when compressing, of the input when decompressing; None is raw.
        input_bytes: length of the body given.
        output_bytes: length of `body`.
        elapsed_seconds: time taken by the clock given; 0.0 without one.
        decision: ``disabled``, ``below_min_input``, ``unavailable``, ``below_savings``,
            ``compressed``, ``legacy_raw`` or ``decompressed``.
    """

    body: Body
    encoding: str | None
    input_bytes: int
    output_bytes: int
    elapsed_seconds: float
    decision: str

    @property
    def compressed(self) -> bool:
        """Whether `encoding` is not raw."""
        return self.encoding is not None


_DEFAULTS: Final[dict[tuple[str, str], CompressionPolicy]] = {
    # A decode step is one position, a few KiB: below any threshold that could pay.
    ("lan", "prefill"): CompressionPolicy(64 * 1024),
    ("lan", "decode"): CompressionPolicy(128 * 1024),
    ("relay", "prefill"): CompressionPolicy(32 * 1024),
    ("relay", "decode"): CompressionPolicy(128 * 1024),
    ("benchmark", "prefill"): CompressionPolicy(64 * 1024),
    ("benchmark", "decode"): CompressionPolicy(128 * 1024),
}


class CompressionPolicies:
    """The policy for each route (lan, relay, benchmark) and phase (prefill, decode).

    Args:
        policies: by (route, phase) in lower case; None takes the defaults.
        overrides: variables ``MESHNET_COMPRESSION_<ROUTE>_<PHASE>_<NAME>``, NAME being
            MIN_INPUT_BYTES, MIN_SAVINGS_BYTES, MIN_SAVINGS_RATIO, LEVEL, ENABLED or ENCODING, as in
            ``MESHNET_COMPRESSION_RELAY_PREFILL_MIN_INPUT_BYTES=32768``; keys without
            that prefix are passed over. Read once, here. Numbers below 0 count as 0, levels
            over 22 as 22. A value that cannot be read is named in one warning and leaves
            the policy's own; a variable that names no setting is named in one warning.
    """

    def __init__(
        self,
        policies: Mapping[tuple[str, str], CompressionPolicy] | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        variables = {} if overrides is None else overrides
        self._policies = {
            key: _override(policy, _prefix(*key), variables)
            for key, policy in (_DEFAULTS if policies is None else policies).items()
        }
        known = {_prefix(*key) + name for key in (*_DEFAULTS, *self._policies) for name in _NAMES}
        for name in sorted(variables):
            if name.startswith(_VARIABLE_PREFIX) and name not in known:
                logger.warning("%s: no such setting; it has no effect", name)

    def for_condition(self, route: str, phase: str) -> CompressionPolicy:
        """Give the policy of `route` and `phase`, in any case.

        Raises:
            ValueError: no such route or phase; the message names those there are.
        """
        policy = self._policies.get((route.lower(), phase.lower()))
        if policy is None:
            known = ", ".join("/".join(key) for key in self._policies)
            raise ValueError(
                f"unknown compression condition {route}/{phase}; expected one of: {known}"
            )
        return policy


def compress_activation(
    body: Body,
    policy: CompressionPolicy,
    *,
    clock: Clock | None = None,
    encoding: str = _ZSTD,
    width: int | None = None,
) -> CompressionResult:
    """Compress `body` where `policy` allows it and the savings reach both thresholds.

    Compression is an option of the transport, never a reason to refuse an activation: an
    encoder that is missing or out of memory gives the raw body, decision ``unavailable``.

    Args:
        body: C-contiguous; read in place.
        policy: thresholds and level; which encoding it names does not count here.
        clock: monotonic seconds, for `CompressionResult.elapsed_seconds`.
        encoding: one of `meshnet.codec.ENCODINGS`.
        width: see `meshnet.codec.compress`.

    Raises:
        ValueError: bf16p, and `body` is not whole rows of `width`.
    """
    watch = _Watch(clock)
    num_bytes = memoryview(body).nbytes
    if not policy.enabled:
        return _raw(body, num_bytes, watch, "disabled")
    if num_bytes < policy.min_input_bytes:
        return _raw(body, num_bytes, watch, "below_min_input")
    try:
        candidate = compress(encoding, body, _clamp_level(policy.level), width=width)
    except (ImportError, MemoryError):
        return _raw(body, num_bytes, watch, "unavailable")
    saved = num_bytes - len(candidate)
    if saved < policy.min_savings_bytes or saved / max(1, num_bytes) < policy.min_savings_ratio:
        return _raw(body, num_bytes, watch, "below_savings")
    return CompressionResult(
        candidate, encoding, num_bytes, len(candidate), watch.elapsed_s(), "compressed"
    )


def decompress_activation(
    body: Body,
    encoding: str | None,
    *,
    max_output_bytes: int | None = None,
    clock: Clock | None = None,
    width: int | None = None,
) -> CompressionResult:
    """Decode an encoded body, or pass a raw one (`encoding` None or empty) through.

    Every zstd frame must be whole and nothing may follow the last; several frames and
    skippable frames are valid. Memory taken stays within the bound and a window of 8 MiB,
    whatever the body claims. Where the tensor's shape is known, `meshnet.codec.decompress`
    also checks the exact size.

    Args:
        body: C-contiguous.
        encoding: value of X-Meshnet-Encoding.
        max_output_bytes: longest result; None takes the wire's limit on a chunk
            (`meshnet.wire.WireLimits`, 256 MiB).
        clock: monotonic seconds, for `CompressionResult.elapsed_seconds`.
        width: see `meshnet.codec.compress`; bf16p needs it.

    Raises:
        CompressionError: an encoding that is not known, or a body that is malformed or
            longer than the bound.
        ValueError: `max_output_bytes` is negative.
    """
    watch = _Watch(clock)
    limit = DEFAULT_LIMITS.max_chunk_bytes if max_output_bytes is None else max_output_bytes
    if limit < 0:
        raise ValueError(f"max_output_bytes {limit}: expected 0 or more")
    num_bytes = memoryview(body).nbytes
    if not encoding:
        if num_bytes > limit:
            raise CompressionError(
                f"Content-Length: raw body has {num_bytes} bytes; expected at most {limit}",
                field="Content-Length",
                code=Code.TOO_LARGE,
            )
        return _raw(body, num_bytes, watch, "legacy_raw")
    try:
        raw = decompress_within(encoding, body, limit, width)
    except WireError as error:
        raise CompressionError(error.message, field=error.field, code=error.code) from error
    return CompressionResult(raw, encoding, num_bytes, len(raw), watch.elapsed_s(), "decompressed")


class _Watch:
    """Seconds since its making, by a clock that may be absent."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._started = clock() if clock is not None else 0.0

    def elapsed_s(self) -> float:
        return self._clock() - self._started if self._clock is not None else 0.0


def _raw(body: Body, num_bytes: int, watch: _Watch, decision: str) -> CompressionResult:
    return CompressionResult(body, None, num_bytes, num_bytes, watch.elapsed_s(), decision)


def _clamp_level(level: int) -> int:
    return min(max(0, level), MAX_LEVEL)


def _prefix(route: str, phase: str) -> str:
    return f"{_VARIABLE_PREFIX}{route.upper()}_{phase.upper()}_"


def _override(
    policy: CompressionPolicy, prefix: str, variables: Mapping[str, str]
) -> CompressionPolicy:
    def read(name: str, parse: Callable[[str], _T], default: _T) -> _T:
        text = variables.get(prefix + name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            logger.warning("%s%s=%r: %s; using %s", prefix, name, text[:80], error, default)
            return default

    return replace(
        policy,
        min_input_bytes=read("MIN_INPUT_BYTES", _parse_count, policy.min_input_bytes),
        min_savings_bytes=read("MIN_SAVINGS_BYTES", _parse_count, policy.min_savings_bytes),
        min_savings_ratio=read("MIN_SAVINGS_RATIO", _parse_ratio, policy.min_savings_ratio),
        level=read("LEVEL", _parse_level, policy.level),
        enabled=read("ENABLED", _parse_switch, policy.enabled),
        encoding=read("ENCODING", _parse_encoding, policy.encoding),
    )


def _parse_count(text: str) -> int:
    try:
        return max(0, int(text))
    except ValueError:
        raise ValueError("expected a whole number") from None


def _parse_level(text: str) -> int:
    return _clamp_level(_parse_count(text))


def _parse_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not math.isfinite(ratio):
        raise ValueError("expected a finite number")
    return max(0.0, ratio)


def _parse_encoding(text: str) -> str:
    word = text.strip().lower()
    if word in (AUTO, *ENCODINGS):
        return word
    raise ValueError(f"expected one of {', '.join((AUTO, *ENCODINGS))}")


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off")
