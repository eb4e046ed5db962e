"""The places in csrc/device that order something, as tools/mutate weakens them one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "csrc/device"
# They are the primitives, or run nothing that ships.
EXCLUDED = ("arch", "bench", "examples")

# An operation of arch that orders something -> what it can be weakened to.
ACCESS = ("relaxed", "narrow")
LEFT_OUT = ("relaxed",)
OPERATIONS = {
    **{f"ld_acquire_{scope}": ACCESS for scope in ("gpu", "sys")},
    **{f"st_release_{scope}": ACCESS for scope in ("gpu", "sys")},
    **{f"atomic_add_acq_rel_{scope}": ACCESS for scope in ("gpu", "sys")},
    **{f"fence_acq_rel_{scope}": ACCESS for scope in ("gpu", "sys")},
    "ld_acquire_cta": LEFT_OUT,
    "st_release_cta": LEFT_OUT,
    "atomic_add_acq_rel_cta": LEFT_OUT,
    "fence_acq_rel_cta": LEFT_OUT,
    "fence_proxy_async": LEFT_OUT,
    "fence_proxy_async_shared": LEFT_OUT,
    "fence_proxy_async_global": LEFT_OUT,
    "sync_warp": LEFT_OUT,
    "sync_block": LEFT_OUT,
    "sync_block_apart": LEFT_OUT,
    "mbarrier_try_wait_parity": LEFT_OUT,
    "bulk_wait": LEFT_OUT,
    "bulk_wait_read": LEFT_OUT,
}
# They order a block's shared memory, whose races the simulated machine finds where it is asked to.
OF_SHARED_MEMORY = {
    op for op in OPERATIONS
    if op.endswith("_cta") or not op.endswith(("_gpu", "_sys", "_global"))
}  # fmt: skip

# The simulated suites, from tests/ on, by the folder of csrc/device whose kernels they run.
SUITES = {
    "intranode": (
        "cpu/normal/test_simulated_end_to_end.py",
        "cpu/normal/test_expand_simulated.py",
        "cpu/normal/test_absent.py",
        "cpu/simt/test_negative_controls.py",
    ),
    "low_latency": (
        "cpu/low_latency/test_low_latency_simulated.py",
        "cpu/low_latency/test_low_latency_masks.py",
        "cpu/normal/test_max_num_tokens.py",
    ),
    "internode": (
        "cpu/internode/test_internode_simulated.py",
        "cpu/internode/test_expand_internode_simulated.py",
        "cpu/internode/test_internode_errors.py",
    ),
    "tp": (
        "cpu/tp/test_tp_calls.py",
        "cpu/tp/test_collectives.py",
        "cpu/tp/test_products.py",
        "cpu/tp/test_symmetric.py",
    ),
}
OF_ALL = "cpu/normal/test_mixed_calls.py"

CALL = re.compile(r"\barch::(?P<op>[a-z_]+)(?:<[^>\n]*>)?\(")
# // order-proof: the proof, which may go on in the next lines of the comment
# // order-proof (narrow): of that weakening alone
PROOF = re.compile(r"//\s*order-proof(?: \((?P<how>relaxed|narrow)\))?: (?P<proof>.*)")


@dataclass(frozen=True)
class OrderedSite:
    file: str  # from csrc/ on
    line: int
    op: str
    # How it can be weakened -> why nobody can see that, by the comment before it.
    proofs: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.op}"


def sites_of(root: Path, source: Path) -> list[OrderedSite]:
    """The ordered sites of one file, in its order."""
    sites = []
    comment: list[str] = []
    name = str(source.relative_to(root / "csrc"))
    for number, line in enumerate(source.read_text().splitlines(), 1):
        code = line.split("//")[0]
        if not code.strip():
            comment = [*comment, line] if "//" in line else []
            continue
        for match in CALL.finditer(code):
            if match["op"] in OPERATIONS:
                sites.append(
                    OrderedSite(name, number, match["op"], _proofs([*comment, line], match["op"]))
                )
        # A statement may begin before the line of the call.
        if code.rstrip().endswith((";", "{", "}")):
            comment = []
    return sites


def _proofs(comment: list[str], op: str) -> dict[str, str]:
    proofs: dict[str, str] = {}
    proven: tuple[str, ...] = ()  # by the lines that follow
    for line in comment:
        text = line.partition("//")[2].strip()
        if match := PROOF.search(line):
            proven = (match["how"],) if match["how"] else OPERATIONS[op]
            text = match["proof"].strip()
        elif not text:
            proven = ()
        for how in proven:
            proofs[how] = f"{proofs.get(how, '')} {text}".strip()
    return proofs


def all_sites(root: Path) -> list[OrderedSite]:
    """Every ordered site of the kernels, by file and line."""
    sites = []
    for source in sorted((root / FOLDER).rglob("*.cuh")):
        if source.relative_to(root / FOLDER).parts[0] not in EXCLUDED:
            sites += sites_of(root, source)
    return sites


def suites_for(sites: list[OrderedSite]) -> list[str]:
    """Those that can reach the sites."""
    folders = {site.file.split("/")[1] for site in sites}
    chosen = [suite for name in SUITES if name in folders for suite in SUITES[name]]
    if not folders <= SUITES.keys():
        chosen = [suite for suites in SUITES.values() for suite in suites]
    return [OF_ALL, *chosen]
