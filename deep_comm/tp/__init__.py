"""Tensor parallelism: collectives and products over the symmetric memory of one node.

Sums are taken in float32 in rank order and rounded once, so every rank and every run has the same
bits; over memory with multicast an NVLink switch takes them, in its own order. Calls run on the
current stream and can be captured into CUDA graphs. ``deep_comm.reference.tp`` says what results
must be.
"""

from deep_comm.tp.collectives import all_gather, all_reduce, all_reduce_norm, reduce_scatter
from deep_comm.tp.matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from deep_comm.tp.torch_ops import install, register

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_norm",
    "install",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "register",
]
