"""The pictures of the documentation, drawn from text and from docs/pictures/times.json.

`tools/docs` runs this as a program, and writes docs/pictures/*.svg. Nothing beyond the standard
library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from svg import Drawing

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
COLOURS = ("blue", "green", "orange", "purple")

# Two ranks, four tokens, top-2 of four experts; two experts on each rank.
SELECTED = ((0, 2), (0, 1), (1, 3), (2, 3))
RECEIVED = tuple(
    tuple(t for t, chosen in enumerate(SELECTED) if any(e // 2 == rank for e in chosen))
    for rank in range(2)
)


def _list(numbers: list[int]) -> str:
    word = "expert" if len(numbers) == 1 else "experts"
    return f"{word} {', '.join(map(str, numbers))}"


def _caption(it: Drawing, y: float, *lines: str) -> None:
    for number, line in enumerate(lines):
        it.text(it.width / 2, y + 18 * number, line, look="dim small", at="middle")


def dispatch_combine() -> Drawing:
    it = Drawing(820, 362, "Dispatch and combine of four tokens between two ranks")
    columns = ((20, 170, "tokens"), (310, 210, "received rows"),
               (650, 150, "results"))  # fmt: skip
    for x, width, words in columns:
        it.text(x + width / 2, 30, words, look="ink bold", at="middle")
        for rank in range(2):
            top = 45 + 150 * rank
            it.box(x - 8, top, width + 16, 138, "grey", dashed=True)
            is_middle = x == 310
            held = f"rank {rank}" + (f": experts {2 * rank}, {2 * rank + 1}" if is_middle else "")
            it.text(x, top + 18, held, look="dim small")
    it.text(250, 30, "dispatch", look="ink bold", at="middle")
    it.text(588, 30, "combine", look="ink bold", at="middle")

    def token_y(token: int) -> float:
        return 45 + 150 * (token // 2) + 34 + 46 * (token % 2)

    def row_y(rank: int, row: int) -> float:
        return 45 + 150 * rank + 28 + 35 * row

    for token, chosen in enumerate(SELECTED):
        colour, y = COLOURS[token], token_y(token)
        it.box(20, y, 170, 34, colour, f"token {token} → {_list(list(chosen))}")
        it.box(650, y, 150, 34, colour, f"token {token}: sum")
    for rank, tokens in enumerate(RECEIVED):
        for row, token in enumerate(tokens):
            here = [expert for expert in SELECTED[token] if expert // 2 == rank]
            colour, y = COLOURS[token], row_y(rank, row)
            it.box(310, y, 210, 30, colour, f"token {token} for {_list(here)}")
            it.arrow([(192, token_y(token) + 17), (308, y + 15)], colour)
            it.arrow([(522, y + 15), (648, token_y(token) + 17)], colour)
    _caption(
        it,
        350,
        "A token travels once to each rank, however many of its experts are there (token 1). "
        "Rows are sorted by source rank and token.",
    )
    return it


def buffer_memory() -> Drawing:
    it = Drawing(820, 402, "The memory of a Buffer, and which way the rows of a call take")
    it.text(20, 30, "num_nvl_bytes: normal mode", look="ink bold")
    it.text(20, 62, "below 128 MiB", look="dim")
    it.box(140, 42, 150, 30, "orange", "rings")
    it.text(20, 108, "128 MiB or more", look="dim")
    it.box(140, 88, 150, 30, "orange", "rings, 64 MiB")
    it.box(290, 88, 510, 30, "blue", "receive region: the rest")
    it.text(20, 152, "num_rdma_bytes: low-latency mode", look="ink bold")
    for half, x in enumerate((140, 360)):
        words = f"half {half}: a slot per token and rank"
        it.box(x, 164, 220, 30, "green", words)
    it.box(580, 164, 220, 30, "grey", "rows that go back")
    it.text(20, 184, "calls take turns", look="dim")
    it.text(20, 232, "A dispatch or combine of normal mode", look="ink bold")
    it.box(
        20, 246, 250, 50, "grey", "Do all ranks have room for", "its rows in the receive region?"
    )
    it.arrow([(272, 262), (338, 262)], "blue", width=2)
    it.text(304, 254, "yes", look="dim small", at="middle")
    it.box(340, 246, 460, 34, "blue", "direct: peers write each row once, to its final place")
    it.arrow([(145, 298), (145, 333), (338, 333)], "orange", width=2)
    it.text(304, 325, "no", look="dim small", at="middle")
    it.box(
        340,
        310,
        460,
        46,
        "orange",
        "rings: chunks of rows, copied out by the receiver; slower.",
        "A PerformanceWarning says once how much is missing.",
    )
    _caption(
        it,
        386,
        "Results are the same bits either way. buffer.stats() counts the calls of each kind.",
    )
    return it


def low_latency() -> Drawing:
    it = Drawing(820, 306, "Low-latency calls with and without hooks, over time")
    it.arrow([(120, 282), (800, 282)])
    it.text(800, 299, "time", look="dim small", at="end")

    def row(y: float, words: str, blocks: list[tuple[float, float, str, str]]) -> None:
        it.text(110, y + 20, words, look="dim", at="end")
        for x, width, colour, name in blocks:
            it.box(x, y, width, 30, colour, name, look="ink small")

    it.text(20, 28, "Without hooks: a call sends, waits and receives", look="ink bold")
    row(40, "GPU", [(120, 190, "blue", "dispatch"), (312, 120, "orange", "experts"),
                    (434, 190, "green", "combine")])  # fmt: skip
    row(76, "links", [(150, 110, "blue", "rows"), (464, 110, "green", "rows")])
    it.text(20, 142, "With return_recv_hook=True: something else is computed while rows travel",
            look="ink bold")  # fmt: skip
    row(154, "GPU", [(120, 50, "blue", "send"), (172, 112, "purple", "other work"),
                     (286, 60, "blue", "hook()"), (348, 120, "orange", "experts"),
                     (470, 50, "green", "send"), (522, 112, "purple", "other work"),
                     (636, 60, "green", "hook()")])  # fmt: skip
    row(190, "links", [(150, 110, "blue", "rows"), (500, 110, "green", "rows")])
    it.text(120, 246, "Between send and hook() no SM is held. Other work: shared experts, or "
            "the second micro-batch.", look="dim small")  # fmt: skip
    it.text(120, 264, "Lengths are not to scale.", look="dim small")
    return it


def overlap() -> Drawing:
    it = Drawing(820, 330, "Products beside their collective, on rank 0 of 4, over time")
    it.arrow([(130, 306), (800, 306)])
    it.text(800, 323, "time", look="dim small", at="end")

    def row(y: float, words: str, blocks: list[tuple[float, float, str, str]]) -> None:
        it.text(120, y + 20, words, look="dim", at="end")
        for x, width, colour, name in blocks:
            it.box(x, y, width, 30, colour, name, look="ink small")

    it.text(20, 28, "all_gather_matmul: copy engines push this rank's rows, with which the "
            "product begins", look="ink bold")  # fmt: skip
    row(40, "copy engines", [(150, 72, "blue", "to rank 1"), (224, 72, "blue", "to rank 2"),
                             (298, 72, "blue", "to rank 3")])  # fmt: skip
    row(76, "links, in", [(150, 72, "green", "of rank 3"), (224, 72, "orange", "of rank 2"),
                          (298, 72, "purple", "of rank 1")])  # fmt: skip
    row(112, "product", [(150, 140, "blue", "own rows"), (292, 140, "green", "rows of rank 3"),
                         (434, 140, "orange", "rows of rank 2"),
                         (576, 140, "purple", "rows of rank 1")])  # fmt: skip
    it.text(20, 178, "matmul_reduce_scatter: tiles are stored to the rank that adds them; "
            "its own come last", look="ink bold")  # fmt: skip
    row(190, "product", [(150, 140, "green", "rows for rank 1"),
                         (292, 140, "orange", "rows for rank 2"),
                         (434, 140, "purple", "rows for rank 3"),
                         (576, 140, "blue", "own rows, added")])  # fmt: skip
    row(226, "links, out", [(172, 140, "green", "tiles"), (314, 140, "orange", "tiles"),
                            (456, 140, "purple", "tiles")])  # fmt: skip
    it.text(150, 280, "A tile waits for its rows alone. Lengths are not to scale.",
            look="dim small")  # fmt: skip
    return it


def two_tiers() -> Drawing:
    it = Drawing(820, 374, "The way of one token between two nodes")

    def gpu(node: int, index: int) -> tuple[float, float]:
        return 40 + 440 * node, 66 + 62 * index

    for node in range(2):
        it.box(20 + 440 * node, 16, 340, 304, "grey", dashed=True)
        it.text(36 + 440 * node, 40, f"node {node}", look="ink bold")
        it.text(346 + 440 * node, 40, "scale-up: NVLink inside", look="dim small", at="end")
    held = {(0, 1): ("orange", "GPU 1: the token"), (0, 3): ("blue", "GPU 3: expert a"),
            (1, 0): ("blue", "GPU 0: expert b"), (1, 3): ("blue", "GPU 3: expert c")}  # fmt: skip
    for node in range(2):
        for index in range(4):
            x, y = gpu(node, index)
            colour, words = held.get((node, index), ("page", f"GPU {index}"))
            if (node, index) == (1, 1):
                colour, words = "green", "GPU 1: hands it on"
            it.box(x + 100 * (1 - node), y, 150, 38, colour, words)
    it.arrow([(292, 147), (478, 147)], "orange", width=3)
    it.text(410, 136, "one copy", look="ink small", at="middle")
    it.text(410, 166, "rail (RDMA)", look="dim small", at="middle")
    it.arrow([(140, 147), (90, 147), (90, 271), (138, 271)], "blue", width=2)
    it.arrow([(632, 138), (690, 138), (690, 85), (632, 85)], "green", width=2)
    it.arrow([(632, 156), (690, 156), (690, 271), (632, 271)], "green", width=2)
    it.text(702, 112, "forwarded", look="ink small")
    it.text(702, 216, "forwarded", look="ink small")
    _caption(
        it,
        342,
        "A token crosses once to each node that holds one of its experts, to the GPU of the "
        "same number.",
        "Combine goes back the same way: one sum per token and node.",
    )
    return it


def auto_mode() -> Drawing:
    it = Drawing(820, 276, 'ExpertParallel with mode="auto": how a step chooses its mode')
    it.box(30, 90, 210, 66, "green", "decode step", "fixed shapes, no host wait")
    it.box(580, 90, 210, 66, "blue", "prefill step", "any number of tokens")
    it.arrow([(242, 108), (578, 108)], "orange", width=2)
    it.text(410, 82, "a rank has more than decode_tokens:", at="middle")
    it.text(410, 98, "the same call goes on as prefill", look="dim small", at="middle")
    it.arrow([(578, 140), (242, 140)], "green", width=2)
    it.text(410, 160, "no rank had more than decode_tokens:", at="middle")
    it.text(410, 176, "the next step begins as decode", look="dim small", at="middle")
    it.arrow([(90, 88), (90, 56), (180, 56), (180, 88)], "green", width=2)
    it.text(135, 46, "all have few tokens", look="dim small", at="middle")
    it.arrow([(640, 88), (640, 56), (730, 56), (730, 88)], "blue", width=2)
    it.text(685, 46, "a rank has many", look="dim small", at="middle")
    _caption(
        it,
        222,
        "Every exchange tells all ranks the most tokens that any of them had. So all take "
        "the same arrow,",
        "and nobody has to ask before a step. The bits of a result do not depend on the mode "
        "inside a node.",
    )
    return it


def ways_in() -> Drawing:
    it = Drawing(820, 310, "Ways into deep_comm: drop-in, native adapter, layer, calls")
    rows = (
        ("orange", ("vLLM, SGLang, trainers", "as released: import deep_ep"),
         ("drop-in deep_ep", "deep_comm compat install")),
        ("purple", ("vLLM, SGLang", "a variable, or a launcher"),
         ("native adapter", "fewer calls and copies")),
        ("green", ("your program", "inference or training"),
         ("ExpertParallel", "prefill, decode, auto")),
    )  # fmt: skip
    for number, (colour, program, way) in enumerate(rows):
        y = 24 + 76 * number
        it.box(20, y, 220, 52, "grey", *program)
        it.arrow([(242, y + 26), (288, y + 26)], colour, width=2)
        it.box(290, y, 210, 52, colour, *way)
        it.arrow([(502, y + 26), (548, y + 26)], colour, width=2)
    it.arrow([(130, 230), (130, 258), (602, 258), (602, 232)], "green", width=2, dashed=True)
    it.text(366, 252, "or its calls by hand", look="dim small", at="middle")
    it.box(550, 24, 105, 204, "blue", "deep_comm", ".Buffer")
    it.arrow([(657, 126), (688, 126)], "blue", width=2)
    it.box(690, 24, 112, 204, "grey", "kernels for", "GPUs,", "processes,", "simulation")
    _caption(
        it,
        288,
        "Every way ends in the same native calls. The kernels have one source for all three.",
    )
    return it


def silent_rank() -> Drawing:
    it = Drawing(820, 262, "A rank ends in the middle; the others go on without it")
    steps = ((92, 96, "green", "call"), (196, 196, "orange", "waits, at most timeout_s"),
             (400, 104, "purple", "PeerTimeout"), (512, 150, "blue", "reset(without=[2])"),
             (670, 96, "green", "call"))  # fmt: skip
    for rank in range(4):
        y = 26 + 44 * rank
        it.text(80, y + 20, f"rank {rank}", look="dim", at="end")
        for x, width, colour, words in steps:
            if rank != 2:
                it.box(x, y, width, 30, colour, words, look="ink small")
        if rank == 2:
            it.box(92, y, 96, 30, "green", "call", look="ink small")
            it.text(204, y + 20, "has ended", look="dim small")
    it.line([(92, 210), (770, 210)])
    it.text(770, 226, "time", look="dim small", at="end")
    _caption(
        it, 240, "PeerTimeout names the rank that did not come. The CUDA context stays usable."
    )
    return it


def expert_major() -> Drawing:
    it = Drawing(820, 350, "Rows by source, and rows by expert")
    it.text(30, 30, "rank 0 receives (experts 0 and 1)", look="ink bold")
    it.text(30, 48, "by source rank and token", look="dim small")
    it.text(440, 30, "the same with expand=True, expert_alignment=4", look="ink bold")
    it.text(440, 48, "grouped by expert, one row per selection", look="dim small")
    groups = [[t for t in RECEIVED[0] if e in SELECTED[t]] for e in range(2)]
    source = {}
    for row, token in enumerate(RECEIVED[0]):
        y = 96 + 62 * row
        source[token] = y + 16
        here = [e for e in SELECTED[token] if e < 2]
        it.box(30, y, 220, 32, COLOURS[token], f"token {token} for {_list(here)}")
    for expert, tokens in enumerate(groups):
        top = 62 + 124 * expert
        for place in range(4):
            y = top + 28 * place
            if place < len(tokens):
                token = tokens[place]
                it.box(440, y, 220, 24, COLOURS[token], f"token {token}", look="ink small")
                it.arrow([(252, source[token]), (438, y + 12)], COLOURS[token])
            else:
                it.box(440, y, 220, 24, "grey", "padding", look="dim small", dashed=True)
        it.text(674, top + 16, f"expert {expert}: {len(tokens)} rows", look="ink")
        it.text(674, top + 34, f"starts at row {4 * expert}", look="dim small")
    _caption(
        it,
        334,
        "Groups start at multiples of expert_alignment, as grouped GEMMs want them. Token 1 "
        "crosses the link once and is copied here.",
    )
    return it


def times() -> Drawing:
    panels = json.loads((FOLDER / "times.json").read_text())["panels"]
    height = 20 + sum(88 + 58 * len(panel["rows"]) for panel in panels)
    it = Drawing(820, height, "Times beside NCCL, DeepEP V1 and the limit of the links")
    y, left, room = 34.0, 230.0, 340.0  # beside the longest bar there is room for its words
    for panel in panels:
        it.text(20, y, panel["title"], look="ink bold title")
        it.text(20, y + 18, panel["setting"], look="dim small")
        largest = max(max(row["us"], row["rival_us"]) for row in panel["rows"])
        y += 32
        for row in panel["rows"]:
            it.text(left - 10, y + 26, row["name"], at="end")
            own, other = (room * value / largest for value in (row["us"], row["rival_us"]))
            it.box(left, y, own, 20, "blue")
            it.text(left + own + 8, y + 15, f"{row['us']:g} µs  deep_comm", look="ink small")
            it.box(left, y + 23, other, 20, "grey")
            words = f"{row['rival_us']:g} µs  {row['rival']}"
            it.text(left + other + 8, y + 38, words, look="ink small")
            if "limit" in panel:
                limit = row.get("limit_us") or row["us"] * row["of_limit"]
                x = left + room * limit / largest
                it.line([(x, y - 3), (x, y + 46)], "orange", width=2.5)
            y += 58
        if "limit" in panel:
            it.line([(left, y + 2), (left + 22, y + 2)], "orange", width=2.5)
            it.text(left + 30, y + 6, panel["limit"], look="dim small")
        y += 56
    return it


PICTURES = {
    "auto-mode.svg": auto_mode,
    "buffer-memory.svg": buffer_memory,
    "dispatch-combine.svg": dispatch_combine,
    "expert-major.svg": expert_major,
    "low-latency.svg": low_latency,
    "overlap.svg": overlap,
    "silent-rank.svg": silent_rank,
    "times.svg": times,
    "two-tiers.svg": two_tiers,
    "ways-in.svg": ways_in,
}


def main() -> int:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg())
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
