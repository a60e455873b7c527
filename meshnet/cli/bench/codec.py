"""``meshnet bench codec``: what each encoding gives on files of activations, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.cli.bench.measure import Series, interleave, time_cpu
from meshnet.cli.bench.report import Report, Run, Table, progress
from meshnet.codec import ENCODINGS, compress, decompress
from meshnet.dtypes import view_bytes
from meshnet.errors import Code, ConfigError, MeshError

__all__ = ["measure_codec", "read_activations"]

_COPY: Final = "memcpy"
_LEVEL: Final = 1
_MAX_FILE_BYTES: Final = 1 << 30
_SYNTHETIC: Final = "normal-128x4096 (synthetic)"


async def measure_codec(files: Sequence[Path], run: Run) -> Report:
    """Encode and decode each file as one body, beside a memcpy of the same bytes.

    Args:
        files: see `read_activations`; without any, numbers of a normal distribution.
        run: how much to measure.

    Raises:
        ConfigError: a file cannot be read or holds something else.
        MeshError: an encoding gave other bytes back.
    """
    bodies = {str(path): read_activations(path) for path in files} or {_SYNTHETIC: _synthetic()}
    num_rounds, per_round = run.rounds(12), max(1, 6 // run.divisor)
    report = Report("codec: encodings of activation bodies", _NOTES)
    with progress("codec", len(bodies) * num_rounds * (2 * len(ENCODINGS) + 1)) as advance:
        for name, tensor in bodies.items():
            body, width = view_bytes(tensor), tensor.shape[-1]
            coded = {
                encoding: compress(encoding, body, _LEVEL, width=width) for encoding in ENCODINGS
            }
            actions = _actions(name, body, width, coded)
            blocks = {key: partial(time_cpu, action, per_round) for key, action in actions.items()}
            series = await interleave(blocks, num_rounds, advance)
            report.tables.append(_table(name, body, coded, series))
    return report


def read_activations(path: Path) -> npt.NDArray[Any]:
    """Read an .npy file of bfloat16 bits: uint16, or ml_dtypes' bfloat16, ``[..., hidden]``.

    Raises:
        ConfigError: naming the file.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: {size} bytes; expected at most {_MAX_FILE_BYTES}")
        tensor = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="FILE") from None
    except (ValueError, EOFError):
        raise ConfigError(
            f"{path}: not an .npy file; expected one of uint16, the bits of bfloat16", field="FILE"
        ) from None
    # numpy saves ml_dtypes' bfloat16 as two bytes without a meaning.
    if not isinstance(tensor, np.ndarray) or tensor.dtype.str not in ("<u2", "|V2", "<V2"):
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        raise ConfigError(
            f"{path}: {kind}; expected an array of uint16, the bits of bfloat16", field="FILE"
        )
    if tensor.ndim < 2 or not tensor.size:
        raise ConfigError(
            f"{path}: shape {tensor.shape}; expected token positions and channels", field="FILE"
        )
    return tensor.view(np.uint16)


def _synthetic() -> npt.NDArray[Any]:
    random = np.random.default_rng(1)
    return random.standard_normal((128, 4096), np.float32).astype(ml_dtypes.bfloat16)


def _actions(
    name: str, body: memoryview, width: int, coded: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    target = memoryview(bytearray(len(body)))

    def copy() -> None:
        target[:] = body

    actions: dict[str, Callable[[], object]] = {_COPY: copy}
    for encoding, code in coded.items():
        if decompress(encoding, code, len(body), width) != body:
            raise MeshError(Code.DATA_LOSS, f"{name}: {encoding} decoded to other bytes")
        actions[f"{encoding} compress"] = partial(compress, encoding, body, _LEVEL, width=width)
        actions[f"{encoding} decompress"] = partial(decompress, encoding, code, len(body), width)
    return actions


def _table(name: str, body: memoryview, coded: dict[str, Any], series: dict[str, Series]) -> Table:
    columns = ("encoding", "ratio", "compress MB/s", "decompress MB/s", "/ memcpy", "/ memcpy")
    table = Table(f"{name}: {len(body):,} B", columns)
    limit = series[_COPY]
    for encoding in (_COPY, *ENCODINGS):
        copies = encoding == _COPY
        ways = (
            [encoding, encoding] if copies else [f"{encoding} compress", f"{encoding} decompress"]
        )
        there, back = (series[way] for way in ways)
        ratio = 1.0 if copies else len(body) / len(coded[encoding])
        slower = [one.ratio_to(limit).median for one in (there, back)]
        table.data.append(
            {
                "encoding": encoding,
                "file": name,
                "ratio": ratio,
                "compress_mb_s": len(body) / there.median / 1e6,
                "decompress_mb_s": len(body) / back.median / 1e6,
                "compress_over_memcpy": slower[0],
                "decompress_over_memcpy": slower[1],
                "body_bytes": len(body),
            }
        )
        row = table.data[-1]
        table.rows.append(
            (
                encoding,
                f"{ratio:.3f}",
                f"{row['compress_mb_s']:,.0f}",
                f"{row['decompress_mb_s']:,.0f}",
                f"x {slower[0]:.1f}",
                f"x {slower[1]:.1f}",
            )
        )
    return table


_NOTES: Final = (
    "A file is one body. MB/s are of the decoded bytes, by the processor time of one thread.",
    "/ memcpy is the time over that of copying the same bytes into memory in use.",
)
