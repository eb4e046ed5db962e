"""Released adapters of servers and trainers, unmodified, over the drop-in `deep_ep`.

Run by tools/released_adapters, which fetches them; not collected by pytest, for want of a network.
tests/cpu/drop_in/test_released.py tests what they rest on.

    program.py   what one program is: a release, its modules, what it runs; comparisons
    fetch.py     released files from PyPI, checked against the releases' own hashes
    package.py   how `import` finds them, and what stands in for the rest of their packages
    host.py      what the host target answers when an adapter asks for CUDA
    kernels.py   Triton kernels of adapters on the host
    ranks.py     runs a program on processes, a rank each
    *_parts.py   a server's release and its stand-ins; graphs.py what is captured and replayed
    the others   the programs, named for the adapters; native.py: ours in the released ones' place
"""
