"""Starts a worker by the spawn method, as the server does, and prints which dispatcher each has."""

import multiprocessing
import sys


def worker(queue) -> None:
    from sglang.srt.batch_overlap.two_batch_overlap import DeepEPDispatcher

    queue.put(DeepEPDispatcher.__module__)


if __name__ == "__main__":
    from sglang.launch_server import worker as importable
    from sglang.srt.batch_overlap.two_batch_overlap import DeepEPDispatcher

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=importable, args=(queue,))
    process.start()
    print(sys.argv[1:], DeepEPDispatcher.__module__, queue.get(timeout=60))
    process.join()
