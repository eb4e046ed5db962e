"""Tensor parallelism: matrix products that wait for their rows."""
