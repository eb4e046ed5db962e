"""Launches that begin while the one before them ends: what they may touch before they have waited,
and when they may begin at all."""

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from low_latency import LowLatencyCase, run_case, verify
from low_latency_chains import run_chains
from test_build_cuda import cubins_in, needs_cuda_module

import deep_comm
from deep_comm import local, simulate

CASE = LowLatencyCase((3, 5), 5, hidden=128, experts=6, topk=2, calls=2)


@pytest.mark.parametrize("mode", ["plain", "hook"])
@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_kernels_touch_nothing_before_they_have_waited(
    mode: str, use_fp8: bool, compact: bool
) -> None:
    case = LowLatencyCase(
        (3, 0, 5), 5, hidden=128, experts=6, topk=2, calls=2,
        mode=mode, use_fp8=use_fp8, compact=compact,
    )  # fmt: skip
    results = simulate.run(lambda group: run_case(group, case), 3, 1, timeout_s=60)
    verify(case, results)


def test_simulation_finds_a_kernel_that_does_not_wait() -> None:
    with pytest.raises(simulate.MachineError, match="await_earlier_launch"):
        simulate.run(
            lambda group: run_case(group, CASE), 2, 1, faults=("skip_launch_wait",), timeout_s=60
        )


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("num_buffers", [1, 2])
def test_pairs_with_nothing_between_them(num_buffers: int, hooked: bool) -> None:
    """What tests/gpu/test_early_launches_gpu.py runs where launches do begin early."""
    local.run(lambda group: run_chains(group, "cpu", num_buffers, 6, hooked), 3, timeout_s=120)


def _buffer(group: object, num_rdma_bytes: int) -> deep_comm.Buffer:
    return deep_comm.Buffer(
        group, 1 << 20, num_rdma_bytes, low_latency_mode=num_rdma_bytes > 0, device="cpu"
    )


def test_none_begins_early_where_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_EARLY_LAUNCHES", "0")
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 128, 2, 4)

    def fn(group: object) -> bool:
        with _buffer(group, num_bytes) as buffer:
            return buffer.runtime.begins_early

    assert local.run(fn, 2) == [False, False]


def test_only_the_one_buffer_of_a_device_begins_early() -> None:
    """Two that did, on two streams, could each hold the SMs that the other's peers wait for."""
    num_bytes = deep_comm.Buffer.get_low_latency_rdma_size_hint(4, 128, 2, 4)

    def early(*buffers: deep_comm.Buffer) -> list[bool]:
        return [buffer.runtime.begins_early for buffer in buffers]

    def fn(group: object) -> list[list[bool]]:
        first = _buffer(group, num_bytes)
        normal = _buffer(group, 0)
        seen = [early(first, normal)]
        second = _buffer(group, num_bytes)
        seen.append(early(first, second))
        # A call takes what is true now.
        x, idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        second.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
        second.destroy()
        seen.append(early(first))
        first.destroy()
        normal.destroy()
        return seen

    assert local.run(fn, 2, timeout_s=60) == [[[True, False], [False, False], [True]]] * 2


def test_only_the_one_buffer_of_a_device_waits_beside_its_dispatch() -> None:
    """expand_rows holds SMs while it waits for the rows of peers."""

    def expand(buffer: deep_comm.Buffer) -> None:
        x, idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        buffer.dispatch(x, topk_idx=idx, num_experts=2, expand=True)

    def fn(group: object) -> list[bool]:
        first, second = _buffer(group, 0), _buffer(group, 0)
        seen = [first.runtime.begins_early]
        for buffer in (first, second):
            expand(buffer)
            seen.append(first.runtime.begins_early)
        second.destroy()
        expand(first)
        seen.append(first.runtime.begins_early)
        first.destroy()
        return seen

    assert local.run(fn, 2, timeout_s=60) == [[False, True, False, True]] * 2


# Opcodes of sm_90, the lowest twelve bits of an instruction of 16 bytes, as nvdisasm 13.0 names
# them: griddepcontrol.wait, griddepcontrol.launch_dependents, and all that reaches memory of more
# than the block: LD, LDG, ST, STG, ATOM, ATOMG, REDG, bulk copies.
WAIT, LET_GO = 0x82E, 0x82D
MEMORY = {0x980, 0x981, 0x985, 0x986, 0x98A, 0x98E, 0x9A8, 0x3A9, 0x3BA, 0x3BB}


def code_in(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and instructions of every kernel, in the order of their addresses."""
    (section_table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, num_entries, names_idx = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQ", cubin, section_table + idx * entry_bytes)
        for idx in range(num_entries)
    ]
    names = sections[names_idx][4]
    for name_offset, _, _, _, offset, size in sections:
        begin = names + name_offset
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            yield name, cubin[offset : offset + size]


def kernels_in(cubin: bytes) -> Iterator[tuple[str, list[int]]]:
    """Name and opcodes of every kernel, in the order of their addresses."""
    for name, code in code_in(cubin):
        yield name, [code[at] | (code[at + 1] & 0xF) << 8 for at in range(0, len(code), 16)]


def early_accesses(opcodes: list[int]) -> list[int]:
    """Where a kernel reaches memory, or lets later launches go, before it has waited."""
    begin = opcodes.index(WAIT)
    return [at for at, opcode in enumerate(opcodes[:begin]) if opcode in MEMORY | {LET_GO}]


@needs_cuda_module
def test_the_assembler_moves_no_access_before_the_wait() -> None:
    """ld_nc says that nothing writes what it reads: an assembler may move it up to the top."""
    spec = importlib.util.find_spec("deep_comm._cuda")
    assert spec is not None and spec.origin is not None
    kernels = [
        kernel
        for cubin in cubins_in(Path(spec.origin).read_bytes())
        if b"-arch sm_90a" in cubin
        for kernel in kernels_in(cubin)
    ]
    if not kernels:
        pytest.skip("the CUDA module holds no code for sm_90a, whose opcodes these are")
    is_beside = lambda name: "13CombineKernel" in name and "Lb1E" in name
    early = [opcodes for name, opcodes in kernels if WAIT in opcodes and "LowLatency" in name]
    assert len(early) == sum("LowLatency" in name and "Rail" not in name for name, _ in kernels)
    assert len(early) == 20
    # Combine of expanded outputs works before it waits, and lets nothing go; the sums do that.
    beside = [opcodes for name, opcodes in kernels if is_beside(name)]
    assert [(WAIT in opcodes, LET_GO in opcodes) for opcodes in beside] == [(True, False)] * 3
    sums = [opcodes for name, opcodes in kernels if "CombineSumsKernel" in name]
    assert [(WAIT in opcodes, LET_GO in opcodes) for opcodes in sums] == [(False, True)] * 3
    for opcodes in early:
        assert opcodes.count(WAIT) == 1
        assert LET_GO in opcodes
        assert not early_accesses(opcodes)
        assert any(opcode in MEMORY for opcode in opcodes[opcodes.index(WAIT) :])

    beside = [opcodes for name, opcodes in kernels if "ExpandKernel" in name]
    assert len(beside) == 1
    assert WAIT in beside[0]
    assert LET_GO not in beside[0]
    expanded = [opcodes for name, opcodes in kernels if "14DispatchKernelILb1" in name]
    assert len(expanded) == 2
    assert all(LET_GO in opcodes for opcodes in expanded)
    # A plain dispatch works while notify ends, and waits before it tells its peers that it is done.
    notify = [opcodes for name, opcodes in kernels if "12NotifyKernel" in name]
    assert [(WAIT in opcodes, LET_GO in opcodes) for opcodes in notify] == [(False, True)]
    plain = [opcodes for name, opcodes in kernels if "14DispatchKernelILb0" in name]
    assert [(WAIT in opcodes, LET_GO in opcodes) for opcodes in plain] == [(True, False)] * 2


def test_an_access_before_the_wait_would_be_seen() -> None:
    assert early_accesses([0x981, WAIT, LET_GO]) == [0]
    assert early_accesses([0x984, LET_GO, WAIT]) == [1]
    assert early_accesses([0x984, WAIT, LET_GO, 0x986]) == []
