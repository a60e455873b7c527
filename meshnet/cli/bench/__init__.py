"""Benchmarks that people run: ``meshnet bench``. How they measure: tests/bench/README.md."""
