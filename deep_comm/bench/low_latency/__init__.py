"""``python -m deep_comm.bench --mode low-latency``: decode batches,
checked bit for bit, then timed.
"""
