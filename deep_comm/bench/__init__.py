"""Benchmarks: ``python -m deep_comm.bench``. Correctness first, then time; one table and, if asked, JSON."""
