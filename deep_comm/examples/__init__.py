"""Worked examples, from a dispatch by hand to a model that trains; tests run every one of them.

Each runs as ``python -m deep_comm.examples.NAME`` (ranks are processes of this machine, on its
GPUs if there are enough) or under torchrun (``torchrun --nproc-per-node 4 -m
deep_comm.examples.NAME``), and ends with a check of its own that is also the exit code.
"""
