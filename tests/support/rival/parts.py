"""The parts of DeepEP's tests: a program with its flags, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from rival.files import V1, V2, Release

# So small that two cores suffice: on the host target every thread of a kernel is run in turn.
# (With 512 columns a packed scale is one integer, which V1's helper cannot view as bytes.)
_SMALL = ("--num-tokens", "24", "--hidden", "1024", "--num-experts", "48", "--num-topk", "6")
_UNTIMED = ("--skip-perf-test",)


@dataclass(frozen=True)
class Part:
    name: str
    release: Release
    program: str
    flags: tuple[str, ...] = ()
    small: tuple[str, ...] = ()  # further flags on the host target
    # On the host target, where ranks cost little: what shows an order of sums, or ranks that end.
    host_ranks: int = 4
    least_ranks: int = 2
    # A test without end: it is ended when it has printed the line so often.
    endless: tuple[str, int] | None = None
    num_nodes: int = 1  # several: on the host target alone, since GPUs are told apart by node
    variables: tuple[tuple[str, str], ...] = ()


_LOW_LATENCY = "tests/test_low_latency.py"
_EP = "tests/elastic/test_ep.py"


def _ep(name: str, *flags: str, **options: object) -> Part:
    return Part(f"test_ep{name}", V2, _EP, (*flags, *_UNTIMED), _SMALL, **options)  # type: ignore[arg-type]


PARTS = (
    Part("test_intranode", V1, "tests/test_intranode.py", (), _SMALL),
    Part("test_low_latency", V1, _LOW_LATENCY, (), _SMALL),
    Part("test_low_latency-logfmt", V1, _LOW_LATENCY, ("--use-logfmt",), _SMALL),
    Part(
        "test_low_latency-pressure", V1, _LOW_LATENCY, ("--pressure-test",), _SMALL,
        endless=("[rank 0] Dispatch + combine bandwidth", 3),
    ),
    # Ranks 1, 3 and 5 end, and the others expect all of them to be masked.
    Part(
        "test_low_latency-shrink", V1, _LOW_LATENCY, ("--shrink-test",), _SMALL,
        host_ranks=6, least_ranks=6, variables=(("DEEP_COMM_TIMEOUT_S", "5"),),
    ),
    # It insists on eight ranks a node.
    Part(
        "test_internode", V1, "tests/test_internode.py", (), _SMALL,
        host_ranks=16, least_ranks=16, num_nodes=2,
    ),
    _ep(""),
    _ep("-without-cpu-sync", "--do-cpu-sync", "0"),
    _ep("-masked", "--masked-ratio", "0.3"),
    _ep("-masked-without-cpu-sync", "--masked-ratio", "0.3", "--do-cpu-sync", "0"),
    _ep("-unbalanced", "--unbalanced-ratio", "2.0"),
    _ep("-precisely-unbalanced", "--unbalanced-ratio", "1.5", "--precise-unbalanced-ratio"),
    _ep("-deterministic", "--deterministic"),
    _ep("-one-tier", "--allow-hybrid-mode", "0"),
    _ep("-two-nodes", num_nodes=2),
    _ep("-two-nodes-one-tier", "--allow-hybrid-mode", "0", num_nodes=2),
    _ep("-two-nodes-one-reduction", "--allow-multiple-reduction", "0", num_nodes=2),
    _ep("-one-reduction", "--allow-multiple-reduction", "0"),
    _ep(
        "-one-reduction-masked-without-cpu-sync", "--allow-multiple-reduction", "0",
        "--masked-ratio", "0.3", "--do-cpu-sync", "0",
    ),
    _ep(
        "-pressure", "--do-pressure-test", "--test-first-only", endless=("Testing with seed=", 2)
    ),
    _ep(
        "-pressure-one-buffer", "--do-pressure-test", "--reuse-elastic-buffer",
        "--test-first-only", endless=("Testing with seed=", 3),
    ),
    # V1's Buffer as V2 has it, without use_fabric.
    Part("legacy-test_intranode", V2, "tests/legacy/test_intranode.py", (), _SMALL),
    Part("legacy-test_low_latency", V2, "tests/legacy/test_low_latency.py", (), _SMALL),
    Part(
        "legacy-test_internode", V2, "tests/legacy/test_internode.py", (), _SMALL,
        host_ranks=16, least_ranks=16, num_nodes=2,
    ),
    Part("test_barrier", V2, "tests/elastic/test_barrier.py"),
)  # fmt: skip
