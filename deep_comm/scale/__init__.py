"""Dispatch and combine on paper, for 8 to 2048 ranks: a cost model of messages.

The model takes a routing, counts what the kernels would send by their own rules (channels, order of
nodes, one row a (token, node), padding, metadata: `deep_comm.scale.traffic`), and moves it through
queues: SMs, NICs, NVLink, rings with credits (`deep_comm.scale.normal`,
`deep_comm.scale.low_latency`). `python -m deep_comm.scale` makes the tables of docs/scale.md. What
it says about networks is arithmetic, not measurement.
"""
