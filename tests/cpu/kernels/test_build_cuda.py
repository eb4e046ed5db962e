"""The CUDA target as compiled: which instruction each primitive becomes, and what the module holds.

Nothing here needs a GPU. What needs nvcc, or the CUDA module, says so when it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBE, LITMUS = (ROOT / "tests" / "native_cuda" / f"{name}.cu" for name in ("arch_probe", "litmus"))

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is neither in CUDACXX nor on PATH")
needs_cuda_module = pytest.mark.skipif(
    importlib.util.find_spec("deep_comm") is None
    or importlib.util.find_spec("deep_comm._cuda") is None,
    reason="deep_comm was built without nvcc and so has no CUDA module",
)

WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def expected_instructions() -> dict[str, list[str]]:
    """Probe kernel -> the instructions of the primitive, operands left out."""
    expected: dict[str, list[str]] = {}

    def accesses(primitive: str, opcode: str, widths: dict[int, str] = WIDTHS) -> None:
        for num_bytes, suffix in widths.items():
            expected[f"{primitive}_{num_bytes}"] = [f"{opcode}.{suffix}"]

    vector = {**WIDTHS, 16: "v4.u32"}
    accesses("ld_weak", "ld.weak.global", vector)
    accesses("st_weak", "st.weak.global", vector)
    accesses("ld_nc", "ld.global.nc")
    expected["ld_nc_16"] = ["ld.global.nc.L1::no_allocate.v4.u32"]
    accesses("st_streaming", "st.weak.global.L1::no_allocate", vector)

    # Words of block scope may be in shared memory, so their addresses are generic.
    for scope, space in (("cta", ""), ("gpu", ".global"), ("sys", ".global")):
        for order in ("relaxed", "acquire"):
            accesses(f"ld_{order}_{scope}", f"ld.{order}.{scope}{space}")
        for order in ("relaxed", "release"):
            accesses(f"st_{order}_{scope}", f"st.{order}.{scope}{space}")
        for order in ("relaxed", "acq_rel"):
            for kind in ("s32", "u32", "u64"):
                expected[f"atomic_add_{order}_{scope}_{kind}"] = [
                    f"atom.{order}.{scope}{space}.add.{kind}"
                ]
                # Counters of a block are in shared memory.
                expected[f"atomic_add_relaxed_cta_{kind}"] = [f"atom.relaxed.cta.shared.add.{kind}"]
        for kind in ("b32", "b64") if scope != "sys" else ():
            expected[f"atomic_cas_relaxed_{scope}_{kind}"] = [
                f"atom.relaxed.{scope}{space}.cas.{kind}"
            ]
        expected[f"fence_acq_rel_{scope}"] = [f"fence.acq_rel.{scope}"]
    expected["atomic_or_relaxed_gpu"] = ["atom.relaxed.gpu.global.or.b32"]
    expected["atomic_increment_relaxed_gpu"] = ["atom.relaxed.gpu.global.inc.u32"]
    expected["fence_proxy_async"] = ["fence.proxy.async"]
    expected["fence_proxy_async_shared"] = ["fence.proxy.async.shared::cta"]
    expected["fence_proxy_async_global"] = ["fence.proxy.async.global"]

    load = "multimem.ld_reduce.relaxed.sys.global.add"
    expected["multimem_add_relaxed_sys_bf16"] = [f"{load}.acc::f32.v4.bf16x2"]
    expected["multimem_add_relaxed_sys_fp16"] = [f"{load}.acc::f32.v4.f16x2"]
    expected["multimem_add_relaxed_sys_float"] = [f"{load}.v4.f32"]
    expected["multimem_st_relaxed_sys"] = ["multimem.st.relaxed.sys.global.v4.f32"]
    expected["fence_proxy_alias"] = ["fence.proxy.alias"]

    expected["spin_then_read"] = [
        "ld.acquire.sys.global.u32",
        "ld.weak.global.v4.u32",
        "st.weak.global.v4.u32",
    ]
    expected["write_then_release"] = ["st.weak.global.u32", "st.release.sys.global.u32"] * 2
    expected["shared_words"] = [
        "st.relaxed.cta.u32", "bar.sync", "atom.acq_rel.cta.add.u32", "st.release.cta.u32",
        "ld.acquire.cta.u32",
    ]  # fmt: skip

    expected["sync_warp"] = ["bar.warp.sync", "bar.warp.sync"]
    for primitive, mode in (
        ("shfl", "idx"),
        ("shfl_xor", "bfly"),
        ("shfl_up", "up"),
        ("shfl_down", "down"),
    ):
        expected[f"{primitive}_4"] = [f"shfl.sync.{mode}.b32"]
        expected[f"{primitive}_8"] = [f"shfl.sync.{mode}.b32"] * 2
    expected["ballot"] = ["vote.sync.ballot.b32"]
    expected["any"] = ["vote.sync.any.pred"]
    expected["all"] = ["vote.sync.all.pred"]
    expected["match_any_4"] = ["match.any.sync.b32"]
    expected["match_any_8"] = ["match.any.sync.b64"]
    expected["reduce_or"] = ["redux.sync.or.b32"]
    expected["reduce_max"] = ["redux.sync.max.s32"]
    expected["elect_one"] = ["elect.sync"]

    expected["sync_block"] = ["bar.sync"]
    expected["sync_block_apart"] = ["barrier.sync"]
    expected["sync_block_any"] = ["bar.red.or.pred"]
    expected["sync_named"] = ["barrier.sync"]
    expected["arrive_named"] = ["barrier.arrive"]

    # A ticket, the wait for a free slot, which others may have given up, and the words of the
    # descriptor: each carries the ticket's number, so that none is released.
    expected["rail_put"] = expected["rail_signal"] = [
        "atom.relaxed.gpu.global.add.u64", "mov.u64 %globaltimer", "ld.acquire.sys.global.u64",
        "mov.u64 %globaltimer", "ld.relaxed.sys.global.u32", "st.relaxed.sys.global.u32",
        "rem.u64", "rem.u32", *["st.relaxed.sys.global.u64"] * 7,
    ]  # fmt: skip

    expected["mbarrier_init"] = ["mbarrier.init.shared::cta.b64"]
    expected["fence_mbarrier_init"] = ["fence.mbarrier_init.release.cluster"]
    expected["mbarrier_arrive"] = ["mbarrier.arrive.release.cta.shared::cta.b64"]
    expected["mbarrier_try_wait_parity"] = ["mbarrier.try_wait.parity.acquire.cta.shared::cta.b64"]
    expected["bulk_load"] = [
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    ]
    expected["bulk_store"] = ["cp.async.bulk.global.shared::cta.bulk_group"]
    expected["bulk_prefetch"] = ["cp.async.bulk.prefetch.L2.global"]
    expected["bulk_commit"] = ["cp.async.bulk.commit_group"]
    expected["bulk_wait_read"] = ["cp.async.bulk.wait_group.read"]
    expected["bulk_wait"] = ["cp.async.bulk.wait_group"]

    expected["wait_hint"] = []
    expected["wait_note"] = []
    expected["nanosleep"] = ["nanosleep.u32"]
    expected["await_earlier_launch"] = ["griddepcontrol.wait"]
    expected["allow_later_launch"] = ["griddepcontrol.launch_dependents"]
    expected["trap"] = ["ld.weak.global.u32", "trap"]
    expected["globaltimer_ns"] = ["mov.u64 %globaltimer"]

    expected["identity"] = []
    expected["bits"] = []
    expected["bf16_to_float"] = []
    expected["fp16_to_float"] = ["cvt.f32.f16"]
    expected["float_to_bf16"] = ["cvt.rn.bf16.f32"]
    expected["floats_to_e4m3x2"] = ["cvt.rn.satfinite.e4m3x2.f32"]
    expected["max_bf16x2"] = ["max.bf16x2"]
    expected["log2"] = ["lg2.approx.f32"]
    expected["reciprocal"] = ["rcp.approx.ftz.f32"]
    expected["exp2"] = ["ex2.approx.f32"]
    expected["ld_relaxed_sys_vec"] = ["ld.relaxed.sys.global.v4.u32"]
    expected["st_relaxed_sys_vec"] = ["st.relaxed.sys.global.v4.u32"]
    expected["multiply"] = ["mul.rn.f32"]
    expected["float_to_fp16"] = ["cvt.rn.f16.f32"]
    return expected


def expected_on_sm80() -> dict[str, list[str]]:
    """What stands for the instructions that sm_80 lacks; all else is the same."""
    nothing = (
        "elect_one", "fence_proxy_async", "fence_proxy_async_shared", "fence_proxy_async_global",
        "fence_mbarrier_init", "bulk_commit", "bulk_wait_read", "bulk_wait",
        "await_earlier_launch", "allow_later_launch", "floats_to_e4m3x2", "fence_proxy_alias",
    )  # fmt: skip
    expected = expected_instructions()
    return {
        **expected,
        **dict.fromkeys(nothing, []),
        **{probe: ["trap"] for probe in expected if probe.startswith("multimem_")},
        "mbarrier_try_wait_parity": ["mbarrier.test_wait.parity.acquire.cta.shared::cta.b64"],
        "bulk_load": ["cp.async.cg.shared.global"] * 4
        + ["cp.async.mbarrier.arrive.noinc.shared.b64"],
        "bulk_store": ["ld.shared.v4.u32"] * 4 + ["st.weak.global.v4.u32"] * 4,
        "bulk_prefetch": ["prefetch.global.L2"] * 2,
    }


# Arithmetic, control flow and kernel arguments: not what a primitive is about.
PLUMBING = re.compile(
    r"(?:ld\.param|mov|cvta|cvt\.[us]\d+|setp|selp|bra|ret|add|sub|mul(?!\.rn)|mad|shl|shr|and|or|xor|not"
    r"|bfe|bfi|bfind|popc|brev|clz|prmt|min|max(?!\.bf16))\b"
)
PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)([^;]*);", re.MULTILINE)


def instructions_of(body: str) -> list[str]:
    found = []
    for opcode, operands in PTX_LINE.findall(body):
        if "%globaltimer" in operands:
            found.append(f"{opcode} %globaltimer")
        elif not PLUMBING.match(opcode):
            found.append(opcode)
    return found


def ptx_of(source: Path, output: Path, architecture: str = "sm_90a") -> str:
    assert NVCC is not None
    subprocess.run(
        [NVCC, "-std=c++20", "-O3", f"-arch={architecture}", "--expt-relaxed-constexpr"]
        + ["-Werror=all-warnings", f"-I{ROOT / 'csrc'}", "-ptx", str(source), "-o", str(output)],
        check=True,
        timeout=240,
    )
    return output.read_text()


@pytest.fixture(scope="module")
def probe_ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ptx_of(PROBE, tmp_path_factory.mktemp("ptx") / "arch_probe.ptx")


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_the_litmus_tests_of_the_simulation_compile_for_gpus(
    architecture: str, tmp_path: Path
) -> None:
    """Run by tests/gpu1."""
    assert ".entry" in ptx_of(LITMUS, tmp_path / "litmus.ptx", architecture)


@pytest.fixture(scope="module")
def probe_kernels(probe_ptx: str) -> dict[str, list[str]]:
    return kernels_of(probe_ptx)


def kernels_of(probe_ptx: str) -> dict[str, list[str]]:
    pieces = re.split(r"\.entry probe_(\w+)\(", probe_ptx)[1:]
    bodies = {
        name: text[text.index("{") :] for name, text in zip(pieces[::2], pieces[1::2], strict=False)
    }
    # The entry's parameters end at its brace; what follows the last ret is the next entry's.
    return {name: instructions_of(body[: body.index("\n}")]) for name, body in bodies.items()}


def without_result(found: list[str], expected: list[str]) -> list[str]:
    """Probes hand their results out with a plain store, which is not the primitive's."""
    if found and found != expected and found[-1].startswith("st.weak.global."):
        return found[:-1]
    return found


@needs_nvcc
@pytest.mark.parametrize("probe", sorted(expected_instructions()))
def test_a_primitive_is_the_instruction_that_its_name_says(
    probe: str, probe_kernels: dict[str, list[str]]
) -> None:
    expected = expected_instructions()[probe]
    assert without_result(probe_kernels[probe], expected) == expected


@needs_nvcc
def test_what_sm_80_lacks_is_made_of_what_it_has(tmp_path: Path) -> None:
    expected = expected_on_sm80()
    kernels = kernels_of(ptx_of(PROBE, tmp_path / "probe.ptx", "sm_80"))
    found = {probe: without_result(kernels[probe], expected[probe]) for probe in expected}
    assert found == expected


@needs_nvcc
def test_every_probe_kernel_is_expected(probe_kernels: dict[str, list[str]]) -> None:
    assert sorted(probe_kernels) == sorted(expected_instructions())


def primitives_in(name: str) -> set[str]:
    text = (ROOT / "csrc" / "device" / "arch" / name).read_text()
    text = text[text.index("namespace deep_comm::arch") :]
    definition = r"^(?:\[\[noreturn\]\] )?DC_\w+ (?:constexpr )?\w+\*? (\w+)\("
    return set(re.findall(definition, text, re.M)) | set(
        re.findall(r"^DC_DEFINE_\w+\((\w+), ", text, re.M)
    )


def test_every_primitive_of_the_interface_is_probed() -> None:
    common, numbers, on_sm80, on_sm90 = (
        primitives_in(name)
        for name in ("cuda.cuh", "cuda_numbers.cuh", "cuda_sm80.cuh", "cuda_sm90.cuh")
    )
    helpers = {"smem_address", "compiler_fence"}
    assert on_sm80 - helpers == on_sm90
    names = common | numbers | on_sm90
    probes = PROBE.read_text()
    missing = {
        name
        for name in names - helpers
        if not re.search(rf"\b{name}\b", probes)
        and not re.search(rf"\b{re.sub('_(cta|gpu|sys)$', '', name)}_##scope", probes)
    }
    assert len(names) > 60
    assert not missing


@needs_nvcc
def test_non_coherent_loads_appear_only_where_asked(probe_kernels: dict[str, list[str]]) -> None:
    for name, instructions in probe_kernels.items():
        is_asked = name.startswith("ld_nc_")
        assert any(".nc" in opcode for opcode in instructions) == is_asked, name


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100f", "sm_120f"])
def test_the_probe_assembles_without_a_stack(architecture: str, tmp_path: Path) -> None:
    assert NVCC is not None
    report = subprocess.run(
        [NVCC, "-std=c++20", "-O3", f"-arch={architecture}", "--expt-relaxed-constexpr"]
        + ["-Xptxas=-v"]
        + [f"-I{ROOT / 'csrc'}", "-cubin", str(PROBE), "-o", str(tmp_path / "probe.cubin")],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    ).stderr
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert len(stacks) == len(expected_instructions())
    assert set(stacks) == {("0", "0")}


def cubins_in(module: bytes) -> list[bytes]:
    """The device ELF files inside a host ELF file, each up to the next one."""
    starts = [
        match.start()
        for match in re.finditer(b"\x7fELF", module)
        if int.from_bytes(module[match.start() + 18 : match.start() + 20], "little") == 190  # CUDA
    ]
    return [
        module[start:end] for start, end in zip(starts, [*starts[1:], len(module)], strict=True)
    ]


@needs_cuda_module
def test_the_installed_module_holds_cubins_for_sm_90a() -> None:
    spec = importlib.util.find_spec("deep_comm._cuda")
    assert spec is not None and spec.origin is not None
    cubins = cubins_in(Path(spec.origin).read_bytes())
    assert cubins, "the CUDA module holds no device code"
    if re.search(r"90a(?!-virtual)", os.environ.get("DEEP_COMM_CUDA_ARCHS", "90a")):
        # The assembler notes its command line in each cubin.
        assert any(b"-arch sm_90a" in cubin for cubin in cubins)


@needs_cuda_module
def test_the_module_holds_every_kernel_of_the_protocol() -> None:
    spec = importlib.util.find_spec("deep_comm._cuda")
    assert spec is not None and spec.origin is not None
    code = b"".join(cubins_in(Path(spec.origin).read_bytes()))
    normal = (b"LayoutKernel", b"NotifyKernel", b"DispatchKernel", b"CombineKernel")
    for kernel in (*normal, b"LowLatencyDispatchKernel", b"LowLatencyCombineKernel"):
        assert re.search(rb"\.text\.\w*" + kernel, code), kernel.decode()


@needs_cuda_module
def test_the_module_imports_where_there_is_no_driver() -> None:
    # In a process of its own, with the devices hidden. By its path, since the package imports torch
    # and the module must not need it.
    spec = importlib.util.find_spec("deep_comm._cuda")
    assert spec is not None and spec.origin is not None
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("deep_comm._cuda", sys.argv[1])
_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_cuda)
assert "torch" not in sys.modules
assert _cuda.architectures.split(), _cuda.architectures
try:
    _cuda.num_sms(0)
except RuntimeError as error:
    assert "cudaError" in str(error) and "device 0" in str(error), error
else:
    raise SystemExit("a device was found although none is visible")
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-c", code, spec.origin], check=True, env=environment, timeout=60
    )
