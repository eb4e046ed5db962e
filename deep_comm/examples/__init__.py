"""Worked examples, from a dispatch by hand to a model that trains; tests run every one of them.

``deep_comm examples`` lists them, ``deep_comm examples NAME`` runs one: ranks are processes of this
machine, on its GPUs if there are enough. Or under torchrun (``torchrun --nproc-per-node 4 -m
deep_comm.examples.NAME``). Each ends with a check of its own, which is also the exit code.
"""
