"""Released adapters of servers and trainers, unmodified, over the drop-in `deep_ep`.

Run by tools/released_adapters, which fetches them; not collected by pytest, for want of a network.

    program.py   what one program is: a release, its files, what it runs
    fetch.py     released files from PyPI, their hashes as the releases record them
    package.py   how `import` finds them, and what stands in for the rest of their packages
    host.py      what the host target answers when an adapter asks for CUDA
    the others   the programs, named for the adapters
"""
