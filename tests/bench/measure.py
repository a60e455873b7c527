"""Interleaved rounds and paired ratios, as `meshnet bench` has them."""

from __future__ import annotations

from meshnet.cli.bench.measure import Block, Ratio, Series, interleave, median_of

__all__ = ["Block", "Ratio", "Series", "interleave", "median_of"]
