"""Which kernels ask an NVLink switch, and that no module can make a multicast object by itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from test_build_cuda import cubins_in, needs_cuda_module
from test_early_launches import code_in

# Of sm_90, as nvdisasm 13.0 names them: LDGMC; STG.E.128.STRONG.SYS, which is a multicast store if
# its address is one; MEMBAR.SC.SYS, a part of fence.proxy.alias. Opcode, modifiers, their mask.
LOAD_OF_ALL = 0x9A5, 0, 0
STORE = 0x986, 0x115D00, 0xFFFF00
FENCE = 0x992, 0x3000, 0xF000
FORM = re.compile(r"CollectiveKernelILNS_10CollectiveE(\d)ELNS_5DtypeE(\d)ELb([01])E")
ADDS, SPREADS_SUMS = {1, 2, 3, 4}, {3, 4}  # of Collective


def module_bytes(name: str) -> bytes | None:
    spec = importlib.util.find_spec(f"deep_comm.{name}")
    return None if spec is None or spec.origin is None else Path(spec.origin).read_bytes()


def count(code: bytes, instruction: tuple[int, int, int]) -> int:
    opcode, modifiers, mask = instruction
    return sum(
        code[at] | (code[at + 1] & 0xF) << 8 == opcode
        and int.from_bytes(code[at + 8 : at + 12], "little") & mask == modifiers
        for at in range(0, len(code), 16)
    )


@needs_cuda_module
def test_a_switch_is_asked_by_the_forms_with_multicast_alone() -> None:
    module = module_bytes("_cuda")
    assert module is not None
    kernels = [
        kernel
        for cubin in cubins_in(module)
        if b"-arch sm_90a" in cubin
        for kernel in code_in(cubin)
    ]
    if not kernels:
        pytest.skip("the CUDA module holds no code for sm_90a, whose opcodes these are")
    forms = set()
    for name, code in kernels:
        form = FORM.search(name)
        if form is None:
            assert count(code, LOAD_OF_ALL) == 0, name
            continue
        op, dtype, multicast = map(int, form.groups())
        assert (count(code, LOAD_OF_ALL) > 0) == (multicast == 1), name
        assert (count(code, STORE) > 0) == (multicast == 1 and op in SPREADS_SUMS), name
        # Before each report, after a part and at the end: of what is pushed, and of sums.
        assert count(code, FENCE) == 2 * multicast * (1 + (op in SPREADS_SUMS)), name
        forms.add((op, dtype, multicast))
    sums = {(op, dtype, multicast) for op in ADDS for dtype in range(3) for multicast in range(2)}
    assert forms == sums | {(0, 0, 0)}


@pytest.mark.parametrize("name", ["_core", "_cuda", "_nvshmem"])
def test_no_module_names_the_driver_s_multicast_functions(name: str) -> None:
    module = module_bytes(name)
    if module is None:
        pytest.skip(f"deep_comm.{name} is not built")
    assert b"cumulticast" not in module.lower()
