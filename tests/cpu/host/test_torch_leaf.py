"""How calls read and make tensors (csrc/bind/torch), and how their errors reach Python
(csrc/bind/errors.cpp)."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deep_comm import _simt_tests, errors
from deep_comm.events import EventHandle

EXCHANGE_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
LEAVES = {"attributes": None}
if EXCHANGE_API is not None:
    LEAVES["exchange"] = EXCHANGE_API
HOST = torch.device("cpu")
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*ComplexHalf", "ignore:.*quantize", "ignore:.*FakeTensor", "ignore:.*[Ss]parse"
)


@pytest.fixture(params=LEAVES)
def leaf(request: pytest.FixtureRequest) -> str:
    return request.param


class Plain(torch.Tensor):
    pass


class Nested(Plain):
    pass


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


def reader(leaf: str, device: torch.device = HOST) -> Any:
    return _simt_tests.TensorReader(device, LEAVES[leaf])


def framework(leaf: str, comm: Any = None, current: Callable[[], int] | None = None) -> Any:
    """Of a torch that has the exchange API and its compiler's functions, or neither."""
    with pytest.MonkeyPatch.context() as patch:
        if leaf == "attributes":  # whatever is replaced is called in the place of the compiler's
            make = torch.empty_strided
            patch.setattr(torch, "empty_strided", lambda *a, **options: make(*a, **options))
        return _simt_tests.TorchFramework(
            device=HOST, comm_stream=comm, exchange_api=LEAVES[leaf], current_stream=current
        )


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    base = torch.arange(360.0).view(3, 4, 5, 6)
    yield "4-d", base
    yield "0-d", base[1, 1, 1, 1]
    yield "8-d", base.view(1, 3, 1, 4, 1, 5, 1, 6)
    yield "permuted", base.permute(3, 1, 0, 2)
    yield "steps", base[:, ::2, 1:, ::3]
    yield "expanded", base[:1].expand(7, 4, 5, 6)
    yield "empty", base[:, :0]
    yield "empty vector", torch.empty(0, dtype=torch.int64)
    yield "requires grad", base.clone().requires_grad_()
    yield "result of autograd", base.clone().requires_grad_() * 2
    yield "parameter", torch.nn.Parameter(base.clone())
    yield "subclass", base.clone().as_subclass(Plain)
    yield "nested subclass", base.clone().as_subclass(Nested)
    yield "conjugate", torch.ones(3, dtype=torch.complex64).conj()
    with torch.inference_mode():
        yield "inference", base.clone()
    for dtype in DTYPES:
        yield str(dtype), torch.arange(96, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("tensor", [pytest.param(made, id=name) for name, made in tensors()])
def test_a_tensor_is_read_as_torch_describes_it(tensor: torch.Tensor, leaf: str) -> None:
    assert reader(leaf).read(tensor) == {
        "kind": "tensor", "object": tensor, "is_on_device": True, "dtype": tensor.dtype,
        "num_bytes": tensor.element_size(), "num_dims": tensor.dim(), "shape": list(tensor.shape),
        "strides": list(tensor.stride()), "address": tensor.data_ptr(),
        "is_contiguous": tensor.is_contiguous(),
    }  # fmt: skip


def test_of_too_many_dimensions_only_the_number_is_known(leaf: str) -> None:
    tensor = torch.ones(1, 2, 1, 1, 1, 1, 1, 1, 1)
    found = reader(leaf).read(tensor)
    assert (found["kind"], found["num_dims"]) == ("tensor", 9)
    assert found["address"] == tensor.data_ptr()


def test_a_tensor_of_another_device_is_one(leaf: str) -> None:
    for tensor in (torch.empty(2, 3, device="meta"), torch.ones(2, 3)):
        is_host = tensor.device.type == "cpu"
        found = reader(leaf, HOST if not is_host else torch.device("cuda", 0)).read(tensor)
        assert (found["kind"], found["is_on_device"]) == ("tensor", False)
        assert (found["shape"], found["dtype"]) == ([2, 3], torch.float32)


def test_the_hosts_device_may_have_an_index(leaf: str) -> None:
    assert reader(leaf, torch.device("cpu", 0)).read(torch.ones(2))["is_on_device"]


def test_what_is_no_tensor_is_told_apart(leaf: str) -> None:
    class Pretends:
        shape = (2, 3)
        dtype = torch.float32
        device = HOST
        __class__ = torch.Tensor  # type: ignore[assignment]

        def stride(self) -> tuple[int, ...]:
            return 3, 1

        def data_ptr(self) -> int:
            return 64

    read = reader(leaf).read
    assert read(None)["kind"] == "absent" and read(None)["object"] is None
    for value in (3, [torch.ones(2)], (), "x", Pretends(), torch.Tensor, torch.float32, HOST):
        found = read(value)
        assert found["kind"] == "other" and found["object"] is value


def test_a_tensor_without_memory_of_its_own_is_none(leaf: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3)
    for tensor in (fake, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert reader(leaf).read(tensor)["kind"] == "other"

    def mapped(row: torch.Tensor) -> torch.Tensor:
        assert reader(leaf).read(row)["kind"] == "other"
        return row

    torch.vmap(mapped)(torch.ones(2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, strides", [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ()), ((0, 3), (3, 1)), ((5,), (1,))]
)
def test_a_tensor_over_memory_has_its_type_and_strides(
    leaf: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    memory = torch.arange(256, dtype=torch.uint8)
    expected = memory.view(dtype).as_strided(shape, strides)
    ended: list[int] = []
    made = framework(leaf).over(memory.data_ptr(), shape, strides, dtype, lambda: ended.append(1))
    assert type(made) is torch.Tensor and not made.requires_grad
    assert (made.dtype, made.shape, made.stride()) == (dtype, expected.shape, expected.stride())
    if expected.numel() > 0:
        assert made.data_ptr() == memory.data_ptr()
        found = reader(leaf).read(made)
        assert (found["dtype"], found["address"]) == (dtype, memory.data_ptr())
        del found
    assert ended == []
    del made
    assert ended == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, strides", [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((0, 3), (3, 1))])
def test_an_empty_tensor_is_an_ordinary_one(
    leaf: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    made, address = framework(leaf).empty(shape, strides, dtype)
    assert type(made) is torch.Tensor and address == made.data_ptr()
    assert (made.dtype, tuple(made.shape), made.stride()) == (dtype, shape, strides)
    assert address != 0 or math.prod(shape) == 0


def test_an_empty_address_makes_an_empty_tensor(leaf: str) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.qint32):
        made = framework(leaf).over(0, (0, 4), (4, 1), dtype, lambda: None)
        assert (tuple(made.shape), made.dtype) == ((0, 4), dtype)


def test_eight_dimensions_are_made(leaf: str) -> None:
    shape, strides = (1, 2, 1, 2, 1, 2, 1, 2), (16, 8, 8, 4, 4, 2, 2, 1)
    memory = torch.arange(16)
    made = framework(leaf).over(memory.data_ptr(), shape, strides, torch.int64, lambda: None)
    assert torch.equal(made, memory.view(shape))
    assert framework(leaf).empty(shape, strides, torch.int64)[0].stride() == strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.quint8], ids=str)
def test_the_owner_goes_with_the_last_tensor(leaf: str, dtype: torch.dtype) -> None:
    memory, ended = torch.zeros(256, dtype=torch.uint8), threading.Event()
    made = framework(leaf).over(memory.data_ptr(), (4, 4), (4, 1), dtype, ended.set)
    part = made[1:]
    del made
    gc.collect()
    assert not ended.is_set()
    thread = threading.Thread(target=lambda held: held.clear(), args=([part],))
    del part
    # The thread's arguments hold the last reference.
    thread.start()
    thread.join()
    del thread
    assert ended.wait(10)


def test_the_owner_goes_when_autograds_thread_drops_the_last_tensor(leaf: str) -> None:
    """Graphs hold tensors that nobody in Python knows of."""
    memory, ended = torch.zeros(64, dtype=torch.uint8), threading.Event()
    factor = torch.ones(4, requires_grad=True)
    made = framework(leaf).over(memory.data_ptr(), (4,), (1,), torch.float32, ended.set)
    product = (made * factor).sum()
    del made
    assert not ended.is_set()
    product.backward()
    assert ended.wait(10)


def test_an_owners_end_does_not_eat_an_error(leaf: str) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)

    def body() -> None:
        held = framework(leaf).over(memory.data_ptr(), (4,), (1,), torch.float32, lambda: None)
        assert len(held) == 4
        raise KeyError("the first")

    with pytest.raises(KeyError, match="the first"):
        body()


def test_tensors_may_outlive_the_interpreter(leaf: str) -> None:
    program = f"""
import sys, torch
from deep_comm import _simt_tests
api = torch.Tensor.__dlpack_c_exchange_api__ if {leaf == "exchange"} else None
framework = _simt_tests.TorchFramework(
    device=torch.device("cpu"), comm_stream=None, exchange_api=api, current_stream=None)
memory = torch.zeros(64, dtype=torch.uint8)
sys.kept = framework.over(memory.data_ptr(), (4,), (1,), torch.float32, lambda: print("ended"))
kept = [framework.over(memory.data_ptr(), (4,), (1,), torch.float32, lambda: None)]
kept.append(kept)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_default_device_and_dtype_are_not_for_these(leaf: str) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    maker = framework(leaf)
    with torch.device("meta"):
        for dtype in (torch.float32, torch.quint8):
            made = maker.over(memory.data_ptr(), (4,), (1,), dtype, lambda: None)
            assert made.device == HOST
            assert maker.empty((4,), None, dtype)[0].device == HOST


def test_inference_mode_makes_inference_tensors(leaf: str) -> None:
    maker = framework(leaf)
    with torch.inference_mode():
        made = maker.empty((4,), None, torch.float32)[0]
        assert made.is_inference() == torch.empty(4).is_inference()
    assert not maker.empty((4,), None, torch.float32)[0].is_inference()


def test_tensors_have_memory_under_any_mode(leaf: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    maker = framework(leaf)
    with FakeTensorMode():
        if leaf == "attributes":
            with pytest.raises(errors.UnsupportedError, match="fake"):
                maker.empty((4,), None, torch.float32)
        else:  # the compiler's functions do not ask modes
            made, address = maker.empty((4,), None, torch.float32)
            assert type(made) is torch.Tensor and made.data_ptr() == address != 0


def test_a_torch_without_its_compilers_functions_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    for name in ("_empty_strided_cpu", "_reinterpret_tensor"):
        monkeypatch.delattr(guards, name)
    made, address = framework("exchange").empty((4, 3), (1, 4), torch.bfloat16)
    assert made.shape == (4, 3) and made.stride() == (1, 4) and made.dtype == torch.bfloat16
    assert made.data_ptr() == address


def test_what_torch_raises_arrives(leaf: str) -> None:
    with pytest.raises(RuntimeError):
        framework(leaf).empty((1 << 40, 1 << 20), None, torch.float32)


def test_the_host_has_no_streams(leaf: str) -> None:
    maker = framework(leaf)
    assert maker.current_stream() == 0
    assert maker.current_stream_object() is None
    maker.set_current_stream(None)
    maker.record_on_comm(torch.ones(3))
    maker.record_on_current(torch.ones(3))
    assert len(maker.empty((4,), None, torch.float32, on_comm=True)[0]) == 4


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch was told, in order; its current stream is the first item's."""
    log: list[Any] = [Stream(11)]

    def set_stream(stream: Stream) -> None:
        log[0] = stream
        log.append(("set", stream.cuda_stream))

    make = torch.empty_strided
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: log[0])
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: log.append(("record", len(tensor), stream.cuda_stream)),
    )
    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda *given, **options: (
            log.append(("make", torch.utils.deterministic.fill_uninitialized_memory)),
            make(*given, **options),
        )[1],
    )
    return log


def test_the_communication_stream_is_current_while_its_tensors_are_made(
    leaf: str, streams: list[Any]
) -> None:
    maker = framework(leaf, Stream(22), lambda: streams[0].cuda_stream)
    assert maker.current_stream() == 11
    maker.empty((4,), None, torch.float32)
    maker.empty((4,), None, torch.float32, on_comm=True)
    assert streams[1:] == [("make", True), ("set", 22), ("make", True), ("set", 11)]
    assert maker.current_stream() == 11
    with pytest.raises(RuntimeError):
        maker.empty((1 << 40, 1 << 20), None, torch.float32, on_comm=True)
    assert maker.current_stream() == 11


def test_streams_and_events_go_through_torch(leaf: str, streams: list[Any]) -> None:
    comm = Stream(22)
    maker = framework(leaf, comm, lambda: 7)
    assert maker.current_stream() == 7
    caller = maker.current_stream_object()
    assert caller.cuda_stream == 11
    maker.set_current_stream(comm)
    for tensor in (torch.ones(3), torch.ones(0), torch.ones(4).as_subclass(Plain)):
        maker.record_on_comm(tensor)
        maker.record_on_current(tensor)
    assert streams[1:] == [("set", 22)] + [("record", n, 22) for n in (3, 3, 4, 4)]
    waits = []

    class Event(EventHandle):
        def stream_wait(self, stream: Any) -> None:
            waits.append(stream)

    maker.comm_waits_for(Event())
    assert waits == [comm]


def test_deterministic_algorithms_fill_nothing_beside_kernels(
    leaf: str, streams: list[Any]
) -> None:
    maker = framework(leaf, Stream(22), lambda: 7)
    torch.use_deterministic_algorithms(True)
    try:
        maker.empty((4,), None, torch.float32)
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
    assert streams[1:] == [("make", False)]


def test_integers_are_read() -> None:
    read = _simt_tests.read_integer
    assert read(None)[:2] == (False, False)
    assert read(-5) == (True, True, True, -5)
    assert read(True) == (True, True, True, 1)
    assert read(2**63 - 1) == (True, True, True, 2**63 - 1)
    assert read(2**63)[:3] == (True, True, False)
    assert read(-(2**70))[:3] == (True, True, False)
    for value in (1.0, "1", torch.tensor(1), [1]):
        assert read(value)[:2] == (True, False)


def test_flags_are_truth_values() -> None:
    values = (True, False, None, 0, 2, "", "no", [], [0], torch.tensor(True))
    assert [_simt_tests.read_flag(value) for value in values] == [bool(value) for value in values]
    with pytest.raises(RuntimeError, match="ambiguous"):
        _simt_tests.read_flag(torch.ones(2))


def test_errors_have_the_classes_and_values_of_python() -> None:
    throw = _simt_tests.thrower(None)
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    for what, value in (
        ("value", tensor),
        ("type_name", "Tensor"),
        ("repr", f"{tensor!r} of type Tensor"),
        ("device", HOST),
        ("type", torch.bfloat16),
        ("shape", [2, 3]),
        ("nothing", None),
        ("string", "17 bytes"),
        ("number", 17),
        ("flag", True),
    ):
        with pytest.raises(errors.ArgumentError) as raised:
            throw(what, tensor)
        error = raised.value
        assert (type(error), error.argument, error.rule) == (errors.ArgumentError, "x", "must be y")
        assert error.value is value or error.value == value
        assert str(error) == str(errors.ArgumentError("x", value, "must be y"))


def test_other_errors_have_their_classes() -> None:
    throw = _simt_tests.thrower(None)
    with pytest.raises(errors.HandleMismatch, match="handle must be another; got 3 rows"):
        throw("handle", None)
    with pytest.raises(errors.BufferTooSmall) as raised:
        throw("small", None)
    error = raised.value
    assert str(error) == str(errors.BufferTooSmall(10, 20, "this call", "num_rdma_bytes"))
    assert (error.value, error.needed_bytes, error.argument) == (10, 20, "num_rdma_bytes")
    for what, wanted, text in (
        ("unsupported", errors.UnsupportedError, "not here"),
        ("destroyed", errors.BufferDestroyed, "it was"),
        ("general", errors.DeepCommError, "it is"),
        ("recorded", errors.DeepCommError, "a kernel failed"),
        ("standard", ValueError, "of C++"),
        ("interrupted", KeyboardInterrupt, None),
    ):
        with pytest.raises(wanted, match=text) as other:
            throw(what, None)
        assert type(other.value) is wanted
    with pytest.raises(ZeroDivisionError):
        throw("python", lambda: 1 / 0)
    with pytest.raises(errors.ArgumentError, match="x must be y; got 17"):
        _simt_tests.raise_through_pybind11()


def test_what_kernels_recorded_is_raised() -> None:
    def raise_recorded() -> None:
        raise errors.PeerLost("rank 3")

    with pytest.raises(errors.PeerLost, match="rank 3"):
        _simt_tests.thrower(raise_recorded)("recorded", None)
    with pytest.raises(errors.DeepCommError, match="a kernel failed"):
        _simt_tests.thrower(lambda: None)("recorded", None)


def test_functions_of_methods_take_as_many_arguments_as_they_say() -> None:
    function = _simt_tests.thrower(None)
    result = object()
    assert function("", result) is result
    for given in ((), (1,), (1, 2, 3)):
        with pytest.raises(TypeError, match=f"expected 2 arguments, got {len(given)}"):
            function(*given)
    with pytest.raises(TypeError, match="keyword"):
        function("", result=result)
    references = sys.getrefcount(result)
    for _ in range(10):
        function("", result)
        with pytest.raises(errors.ArgumentError):
            function("value", result)
    assert sys.getrefcount(result) == references


def test_the_interpreters_lock_is_let_go_of() -> None:
    ran = threading.Event()

    def other() -> None:
        thread = threading.Thread(target=ran.set)
        thread.start()
        thread.join()

    _simt_tests.unlocked(other)
    assert ran.is_set()


def test_errors_that_nobody_can_be_told_of_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report))
    _simt_tests.report_unraisable(lambda: 1 / 0)
    _simt_tests.report_unraisable(_simt_tests.raise_through_pybind11)
    assert [report.exc_type for report in seen] == [ZeroDivisionError, errors.ArgumentError]
    assert seen[0].object == "a place"


def test_native_modules_do_not_import_torch() -> None:
    program = """
import sys, importlib.util
from pathlib import Path
folder = Path(sys.argv[1])
for name in ("_core", "_simt_tests"):
    path = next(folder.glob(name + ".*.so"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
assert "torch" not in sys.modules
"""
    folder = _simt_tests.__file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", program, folder], check=True, timeout=120)
