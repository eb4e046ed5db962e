"""Released servers and trainers with a small model, over deep_comm and over NCCL: the same tokens,
the same losses?

Run by tools/servers on machines with two GPUs; tests/cpu/tools/test_servers_*.py tests what needs
none. Not collected by pytest.

    releases.py      which releases, their hashes, what a trimmed one is made of
    fetch.py         wheels from PyPI, trimmed and packed
    fatbin.py        machine code of one GPU architecture in an extension module
    models.py        models with random weights, small, or large in few layers
    combinations.py  what runs: a row each, by name, or what it lacks
    runs.py          one row: processes, their time limits, what they leave behind
    offline.py       the engine without a server; serving.py: the HTTP server
    training.py      a trainer on text
    load.py          completions over HTTP: streamed, many at once, aborted; times of each
    compare.py       two runs token by token, loss by loss; figures with intervals; the table
    in_server/       what runs inside the processes of servers and trainers
"""
