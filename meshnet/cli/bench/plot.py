"""Horizontal bars of ratios as SVG text, readable on light and dark pages (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Bar", "BarGroup", "draw_bars"]

_WIDTH: Final = 760
_LEFT: Final = 130
_RIGHT: Final = 150
_BAR: Final = 15
_STEP: Final = 20
_HEAD: Final = 62
_GROUP_HEAD: Final = 30
_FOOT: Final = 34
_LOWEST: Final = 0.5
_TICKS: Final = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

# The card has a background of its own: a page whose theme differs from the system's shows a
# light card on dark or the reverse, and both are readable.
_STYLE: Final = """
  svg { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
  .quiet { fill: #59636e; font-size: 12px }
  .title { font-size: 16px; font-weight: 600 }
  .group { font-weight: 600 }
  .grid { stroke: #d8dee4 }
  .limit { stroke: #59636e; stroke-dasharray: 4 3 }
  .bar { fill: #8c959f }
  .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    text { fill: #e6edf3; stroke: #0d1117 }
    .quiet { fill: #9198a1 }
    .grid { stroke: #262c36 }
    .limit { stroke: #9198a1 }
    .bar { fill: #6e7681 }
    .ours { fill: #4493f8 }
  }
"""


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: to its left.
        ratio: its length, on a logarithmic scale; None draws only the text.
        text: to its right.
        ours: drawn in the colour that stands out.
    """

    label: str
    ratio: float | None
    text: str
    ours: bool = False


@dataclass(frozen=True)
class BarGroup:
    """Bars under one heading."""

    label: str
    bars: Sequence[Bar]


def draw_bars(title: str, subtitle: str, limit: str, groups: Sequence[BarGroup]) -> str:
    """Draw groups of bars over one logarithmic axis; a line marks the ratio 1.

    Args:
        title: first line.
        subtitle: second line: what a bar means.
        limit: what the line at 1 is.
        groups: at least one bar with a ratio.
    """
    ratios = [bar.ratio for group in groups for bar in group.bars if bar.ratio is not None]
    highest = max(2.0, *ratios)
    span = math.log(highest / _LOWEST)
    plot = _WIDTH - _LEFT - _RIGHT

    def x(ratio: float) -> float:
        return _LEFT + plot * math.log(max(ratio, _LOWEST) / _LOWEST) / span

    bottom = _HEAD + sum(_GROUP_HEAD + _STEP * len(group.bars) for group in groups) + 4
    height = bottom + _FOOT
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
            f' viewBox="0 0 {_WIDTH} {height}" role="img" aria-label={quoteattr(title)}>'
        ),
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(16, 26, title, "title"),
        _text(16, 47, subtitle, "quiet"),
    ]
    for tick in _TICKS:
        if tick <= highest:
            name = "limit" if tick == 1 else "grid"
            at = f"{x(tick):.1f}"
            parts.append(f'<line class="{name}" x1="{at}" x2="{at}" y1="{_HEAD}" y2="{bottom}"/>')
            label = limit if tick == 1 else f"{tick:g}x"
            parts.append(_text(x(tick), bottom + 18, label, "quiet", anchor="middle"))
    y = _HEAD
    for group in groups:
        y += _GROUP_HEAD
        parts.append(_text(16, y - 8, group.label, "group"))
        for bar in group.bars:
            parts.append(_text(_LEFT - 8, y + 12, bar.label, anchor="end"))
            end = _LEFT if bar.ratio is None else x(bar.ratio)
            if bar.ratio is not None:
                name = "ours" if bar.ours else "bar"
                parts.append(
                    f'<rect class="{name}" x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}"'
                    f' height="{_BAR}" rx="2"/>'
                )
            parts.append(_text(end + 6, y + 12, bar.text, "quiet"))
            y += _STEP
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, text: str, name: str = "", *, anchor: str = "start") -> str:
    style = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y}"{style} text-anchor="{anchor}">{escape(text)}</text>'
