"""The words of the command line, and how often calls are made. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

ROUTINGS = {
    "uniform": "every expert is as likely as any other",
    "zipf": "the n-th most popular expert is chosen 1/n as often as the first, in a random order",
    "all-to-one": "every token chooses experts of rank 0 alone",
    "idle-rank": "uniform, but the last rank has no tokens of its own",
}
MEANINGS = {
    "layout": "get_dispatch_layout alone",
    "dispatch": "layout, counts, host wait, rows and metadata",
    "dispatch no-wait": "the same with num_worst_tokens: the host waits for nothing",
    "dispatch cached": "rows alone, by the handle of an earlier dispatch",
    "combine": "of an ordinary tensor",
    "combine in place": "of a tensor that lies where dispatch had put its rows",
    "combine weights": "with the weights of the received rows, which are summed beside the rows",
    "combine biased": "with a bias for each token",
    "combine float32": "of float32 rows",
    "dispatch cached by column": "fp8 rows by a handle, their scales stored column by column",
    "dispatch + combine": "chained: what dispatch returned is combined",
    "dispatch + combine no-wait": "chained, with num_worst_tokens",
    "dispatch cached + combine": "chained, by a handle",
    "dispatch cast": "of bf16 rows that travel as FP8 with scales, cast by the kernel",
    "dispatch cast cached": "the same by a handle",
    "dispatch expanded": "rows grouped by local expert, a row for each selection, 128 rows aligned",
    "dispatch expanded cached": "the same by a handle",
    "combine expanded": "of such rows, weighted and added where they lie before they travel",
}
COMBINE_FORMS = ("combine weights", "combine biased", "combine float32")
HOST_WAITS = ("dispatch", "dispatch + combine", "dispatch cast", "dispatch expanded")
TWO_TIER = "two-tier"

LOW_LATENCY_NAMES = ("dispatch", "combine", "pair")
PHASES = ("fused", "hooked")
LAYOUTS = {
    "compact": "each received token once; combine takes rows that their rank has reduced",
    "packed": "expert-major, the weights travel with dispatch",
    "packed-late": "expert-major, the weights come with combine: DeepEP's calls",
}


# Of tensor parallelism: operation, K and N of all ranks together, in words.
PRODUCTS = {
    "up": ("all_gather_matmul", 8192, 28672, "70B, the MLP's first product"),
    "qkv": ("all_gather_matmul", 8192, 10240, "70B, queries, keys and values"),
    "o_proj": ("matmul_reduce_scatter", 16384, 7168, "DeepSeek-V3, the attention's output"),
    "down": ("matmul_reduce_scatter", 28672, 8192, "70B, the MLP's second product"),
    "down ar": ("matmul_all_reduce", 28672, 8192, "the same, summed on every rank"),
}
TP_COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
}


@dataclass(frozen=True)
class Effort:
    num_warmup: int
    num_calls: int  # in a round
    num_rounds: int
    num_single_calls: int  # that p50 and p99 are taken from
    flush_l2: bool = False  # every call alone, after a flush and a barrier
    num_host_calls: int = 0  # in a round for the host's time; 0: that of the rounds above
