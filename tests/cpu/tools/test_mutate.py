"""tools/mutate: which places in the kernels it weakens, and which proofs it accepts."""

from __future__ import annotations

from pathlib import Path

import tool_modules

ROOT = Path(__file__).resolve().parents[3]
ordered_sites = tool_modules.load("lib/ordered_sites.py")

KERNEL = """
DC_DEVICE void publish(uint64_t* word) {
  arch::sync_warp();  // arch::fence_acq_rel_sys() is not a call here
  // pairs with: await
  // order-proof (narrow): all readers are of this GPU,
  // see README.md
  arch::st_release_sys(word,
                       arch::ld_acquire_gpu(word));
  // the bytes have landed
  // order-proof: nobody reads them
  arch::bulk_wait<0>();
  arch::st_relaxed_sys(word, 1);
}
"""


def test_sites_are_the_calls_that_order_something(tmp_path: Path) -> None:
    source = tmp_path / "csrc" / "device" / "sync" / "publish.cuh"
    source.parent.mkdir(parents=True)
    source.write_text(KERNEL)
    sites = ordered_sites.sites_of(tmp_path, source)
    assert [site.name for site in sites] == [
        "device/sync/publish.cuh:3:sync_warp",
        "device/sync/publish.cuh:7:st_release_sys",
        "device/sync/publish.cuh:8:ld_acquire_gpu",
        "device/sync/publish.cuh:11:bulk_wait",
    ]
    proof = {"narrow": "all readers are of this GPU, see README.md"}
    assert [site.proofs for site in sites] == [{}, proof, proof, {"relaxed": "nobody reads them"}]


def test_every_ordered_primitive_can_be_weakened() -> None:
    """The simulated machine and the tool know the same operations."""
    host = (ROOT / "csrc" / "device" / "arch").glob("host*.cuh")
    names = "".join(path.read_text() for path in host)
    for op in ordered_sites.OPERATIONS:
        assert f'"{op}"' in names, op


def test_the_kernels_have_sites_outside_of_the_primitives() -> None:
    sites = ordered_sites.all_sites(ROOT)
    assert len({site.name for site in sites}) > 200
    assert not any(site.file.startswith(("device/arch/", "device/bench/")) for site in sites)


def test_sites_are_tried_with_the_suites_that_can_reach_them() -> None:
    def suites(only: str) -> list[str]:
        sites = [site for site in ordered_sites.all_sites(ROOT) if only in site.file]
        return ordered_sites.suites_for(sites)

    assert all((ROOT / "tests" / suite).is_file() for suite in suites("device/sync/"))
    of_internode = suites("device/internode/")
    assert set(of_internode) == {ordered_sites.OF_ALL, *ordered_sites.SUITES["internode"]}
    assert set(of_internode) < set(suites("device/sync/"))
