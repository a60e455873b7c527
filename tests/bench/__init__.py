"""Benchmarks: ``python -m tests.bench``. See README.md beside this file."""
