"""The demo: a text sent through a Mixture-of-Experts layer that is spread over several ranks.

Run it with ``deep_comm demo FILE``, or ``torchrun --nproc-per-node 4 -m deep_comm.demo FILE``.
"""
