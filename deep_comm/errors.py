"""Every error deep_comm raises on purpose. All derive from DeepCommError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep_comm._core import ErrorRecord


class DeepCommError(RuntimeError):
    """Base of all errors of this package.

    What to do: read the message; `except DeepCommError` catches everything of this package. Raised
    itself only for what a kernel reports and no class below describes: report that as a bug.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is: pickle itself would call the class with the message alone."""
        return remade, (type(self), self.args, vars(self))


def remade(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """An error that was taken apart, without a call of its class."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def is_consequence(error: BaseException) -> bool:
    """Whether a rank raises this because another one failed first."""
    text = str(error)  # of gloo, which raises what everybody does
    return (
        isinstance(error, (PeerTimeout, PeerLost))
        or type(error).__name__ == "SimulationStuck"
        or "onnection closed by peer" in text
        or "onnection reset by peer" in text
    )


class ArgumentError(DeepCommError, ValueError):
    """An argument breaks a rule. Nothing was launched.

    Attributes: ``argument`` (its name), ``value`` (what was given), ``rule`` (what must hold).

    What to do: change the argument that is named. The Buffer is as it was.
    """

    def __init__(self, argument: str, value: Any, rule: str) -> None:
        given = "" if value is None else f"; got {value}"
        super().__init__(f"{argument} {rule}{given}")
        self.argument = argument
        self.value = value
        self.rule = rule


class BufferTooSmall(ArgumentError):
    """num_nvl_bytes cannot hold the rings of this call, or num_rdma_bytes a low-latency call.

    Attributes besides those of ArgumentError, whose ``value`` is the bytes that there are:
    ``needed_bytes``, which would do.

    What to do: build the Buffer with ``needed_bytes``, or omit ``config``, so that rings shrink
    to what there is. For low-latency calls use get_low_latency_rdma_size_hint with the largest
    sizes of all calls.
    """

    def __init__(
        self, num_bytes: int, needed_bytes: int, detail: str, argument: str = "num_nvl_bytes"
    ) -> None:
        super().__init__(argument, num_bytes, f"must be at least {needed_bytes} for {detail}")
        if argument in ("num_nvl_bytes", "num_rdma_bytes"):
            self.args = (f"{self}. deep_comm.Buffer.for_shape finds the sizes for a model's calls",)
        self.needed_bytes = needed_bytes


class HandleMismatch(ArgumentError):
    """A dispatch handle is used with another shape, channel count or group than it was made for.

    What to do: pass the handle of the dispatch whose rows these are, to the Buffer that made
    it. Omit ``config``, or give one with as many SMs.
    """


class TopologyError(DeepCommError):
    """The group does not fit the machine, or what this version supports.

    What to do: put equal numbers of consecutive ranks on every host, or pass ranks_per_node;
    ``deep_comm doctor`` shows which GPUs reach each other.
    """


class BufferDestroyed(DeepCommError):
    """The Buffer was used after destroy().

    What to do: destroy the Buffer after its last call, on every rank.
    """


class AllocationError(DeepCommError):
    """There is no room for a Buffer's memory on this rank. The others get PeerLost.

    Attributes: ``needed_bytes``, of this rank.

    What to do: free memory where the message says that there was too little, or build the Buffer
    with fewer bytes: docs/guide/shapes.md has sizes for known models.
    """

    def __init__(self, needed_bytes: int, detail: str) -> None:
        super().__init__(f"a Buffer needs {needed_bytes} bytes on this rank: {detail}")
        self.needed_bytes = needed_bytes


class UnsupportedError(DeepCommError):
    """Something that this version or this build does not offer.

    What to do: omit the feature; the message says what serves instead, if anything.
    """


class BufferInUse(UnsupportedError):
    """Another thread is in a call of this Buffer, or a signal handler interrupts one.

    Nothing happened, and what was refused may be called again after that call.

    What to do: let one thread at a time make the calls of a Buffer, in the same order on all ranks,
    or give each thread a Buffer of its own.
    """


class UnsupportedArgument(UnsupportedError, TypeError):
    """A keyword that some DeepEP knows and that has no counterpart here. Nothing was launched.

    Also a TypeError, as callers expect that try a keyword and go on without it.

    Attributes: ``function``, ``argument``, ``value``.

    What to do: omit the keyword; the message says what serves instead, if anything.
    """

    def __init__(self, function: str, argument: str, value: Any, reason: str) -> None:
        super().__init__(f"{function}() got {argument}={value!r}: {reason}")
        self.function = function
        self.argument = argument
        self.value = value


class PeerLost(DeepCommError):
    """A rank ended, or reported a failure, while others waited for it on the host.

    What to do: look at the rank that is named: its own error is the cause. Where torch's group has
    lost a rank, torch does not say which: look at all of them.
    """


class PeerTimeout(DeepCommError):
    """A kernel waited for a peer until its deadline. The Buffer can be reset().

    Attributes: ``rank`` (who waited), ``peer`` (for whom; -1: nobody in particular), ``kernel``,
    ``stage``, ``word`` (the shared word), ``channel`` (-1: none), ``seen``, ``expected``,
    ``waited_s``; ``story``: how far the blocks of the call came, of a Buffer that traces
    (deep_comm.trace), else "".

    What to do: look at the peer that is named: it has crashed, is stuck before this call, or
    made other calls. ``reset()`` on all ranks makes the Buffer usable again; if the peer is gone,
    ``reset(without=[peer])`` on the others. If it is only slow, raise ``timeout_s``.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        kernel: str,
        stage: str,
        word: str,
        channel: int,
        seen: int,
        expected: int,
        waited_s: float,
    ) -> None:
        whom = f"rank {peer}" if peer >= 0 else "its peers"
        where = f"{kernel}, stage {stage}" + (f", channel {channel}" if channel >= 0 else "")
        super().__init__(
            f"rank {rank} waited {waited_s:.3f} s for {whom} in {where}: word '{word}' holds "
            f"{seen}, expected {expected}. Look at {whom} first: it has crashed, is stuck before "
            "this call, or made a different sequence of calls. If it is only slow, raise timeout_s "
            "(or DEEP_COMM_TIMEOUT_S). reset() on all ranks makes the Buffer or memory usable "
            "again; a Buffer's reset(without=[...]) on all others, if a rank is gone."
        )
        self.rank = rank
        self.peer = peer
        self.kernel = kernel
        self.stage = stage
        self.word = word
        self.channel = channel
        self.seen = seen
        self.expected = expected
        self.waited_s = waited_s
        self.story = ""


class MaskedOut(DeepCommError):
    """This rank was silent for longer than the others wait, and they go on without it.

    Attributes: ``rank`` (this one), ``kernel`` (in which it noticed).

    What to do: find out what held this rank up, then call reset() on all ranks, which takes it
    back, or low_latency_clean_mask_buffer(), where low-latency calls masked it; or end it.
    """

    def __init__(self, rank: int, kernel: str) -> None:
        super().__init__(
            f"rank {rank} noticed in {kernel} that the other ranks do without it, since it was "
            "silent for longer than their timeout_s; reset() on all ranks takes it back, as does "
            "low_latency_clean_mask_buffer() if low-latency calls masked it"
        )
        self.rank = rank
        self.kernel = kernel


class CallInterrupted(DeepCommError):
    """An earlier call of this Buffer ended in the middle. A signal's handler had raised, as Ctrl-C
    does, or there was no memory for rows that the other ranks were about to send.

    The interrupted call itself raises what ended it (KeyboardInterrupt, torch.OutOfMemoryError);
    the calls after it raise this. The other ranks end with PeerTimeout.

    Attributes: ``rank`` (this one).

    What to do: end this rank; or go on after reset() on all ranks.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"an earlier call of rank {rank} was interrupted in the middle, so that it is out of "
            "step with the other ranks; reset() on all ranks makes the Buffer usable again"
        )
        self.rank = rank


class ConfigMismatch(DeepCommError):
    """Ranks of one Buffer disagree about something that must be equal on all of them.

    Attributes: ``field`` (what), ``values`` (rank -> value, or a digest of arguments),
    ``needs_reset``.

    What to do: give all ranks the same value of what is named; if it is the operation, let
    all ranks make the same calls in the same order. With ``needs_reset`` (low-latency
    calls, reset(without=...)) call reset() on all ranks. Without it the Buffer can be used once
    every rank has raised this error. A rank that comes late, when the others have already begun to
    repeat the call, may raise PeerTimeout instead.
    """

    def __init__(
        self, field: str, values: Mapping[int, Any], needs_reset: bool = False, told: str = ""
    ) -> None:
        listed = ", ".join(f"rank {rank} has {value!r}" for rank, value in sorted(values.items()))
        message = (
            f"ranks disagree about {field}: {told or f'{listed}; it must be equal on all ranks'}"
        )
        if needs_reset:
            message += ". Buffer.reset() on all ranks makes the Buffer usable again"
        super().__init__(message)
        self.field = field
        self.values = dict(values)
        self.needs_reset = needs_reset


class ExpertIndexError(ArgumentError):
    """topk_idx of a rank holds an index that is neither -1 nor one of the experts.

    Attributes besides those of ArgumentError: ``rank`` (whose topk_idx), ``num_experts``,
    ``position`` (in row order; -1: known to that rank alone, as is ``value``).

    What to do: look at the router: indices are global, 0..num_experts-1, or -1 for none. Normal
    mode raises it on all ranks. In low-latency calls, which the layer's decode steps are, only the
    rank concerned does: if it leaves out the calls that the others make next, they end with
    PeerTimeout.
    """

    def __init__(
        self,
        rank: int,
        num_experts: int,
        value: int | None,
        position: int = -1,
        num_topk: int = -1,
    ) -> None:
        where = f" (element {position} in row order)" if position >= 0 else ""
        if position >= 0 and num_topk > 0:
            where = f" (topk_idx[{position // num_topk}, {position % num_topk}])"
        super().__init__(
            "topk_idx", value, f"of rank {rank} must hold -1 or 0..{num_experts - 1} only{where}"
        )
        self.rank = rank
        self.num_experts = num_experts
        self.position = position


class CapacityError(DeepCommError):
    """More rows arrived than num_worst_tokens allows.

    Attributes: ``needed_rows``, ``available_rows``.

    What to do: raise num_worst_tokens, of a layer its max_recv_rows: the number of tokens of all
    ranks together is always enough; with expand=True, as in layers, that number times top-k, and
    expert_alignment - 1 for each local expert.
    """

    def __init__(self, rank: int, needed_rows: int, available_rows: int) -> None:
        super().__init__(
            f"rank {rank} is sent {needed_rows} rows, but num_worst_tokens, of a layer its "
            f"max_recv_rows, is {available_rows}; raise it (the number of tokens of all ranks "
            "together is always enough; with expand=True that times top-k, and expert_alignment "
            "- 1 for each local expert)"
        )
        self.rank = rank
        self.needed_rows = needed_rows
        self.available_rows = available_rows


# Calls by the kernel with which they begin, where it has another name.
_CALLS = {
    "notify_dispatch": "dispatch",
    "dispatch": "dispatch with a handle",
    "internode_notify": "dispatch",
    "internode_dispatch": "dispatch with a handle",
    "internode_combine": "combine",
}
# Kinds of records after which ranks are no longer in step.
_OUT_OF_STEP = ("peer_timeout", "masked_out", "interrupted")


def needs_reset(record: ErrorRecord) -> bool:
    """Can the Buffer be used again only after a reset()? Ranks are out of step then; or, after a
    mismatch of low latency, have written rows into each other's memory that nobody expects; or, of
    reset(without=...), have gone on without different ranks.
    """
    if record.kind == "config_mismatch":
        return record.kernel.startswith(("low_latency", "reset"))
    return record.kind in _OUT_OF_STEP


def _ranks_of(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def _different_calls(
    record: ErrorRecord, peer: int, peer_kernel: str, needs_reset: bool
) -> ConfigMismatch:
    kernels = {record.rank: record.kernel, peer: peer_kernel}
    calls = {rank: _CALLS.get(kernel, kernel) for rank, kernel in kernels.items()}
    return ConfigMismatch("the operation", calls, needs_reset)


def _different_arguments(record: ErrorRecord) -> ConfigMismatch:
    """Of one operation. Ranks compare digests, which say nothing to a caller."""
    what = "a shape, a dtype, an option or the Config"
    if record.kernel.startswith("low_latency"):
        what = (
            "num_max_dispatch_tokens_per_rank, hidden, top-k, num_experts, SMs, the format of the "
            "rows and their scales, one_rounding, or whether weights travel"
        )
    ranks = "ranks {} and {}".format(*sorted((record.rank, record.peer)))
    if record.seen == 0:
        ranks = f"rank {record.peer} and a rank of another node"
    return ConfigMismatch(
        f"the arguments of the operation {_CALLS.get(record.kernel, record.kernel)}",
        {record.rank: record.expected, record.peer: record.seen},
        needs_reset(record),
        f"{ranks} differ in {what}. Compare the calls; DEEP_COMM_LOG=debug logs those of a Buffer",
    )


def _different_dtypes(record: ErrorRecord) -> ConfigMismatch:
    """Ranks compare the dtypes of x and of its scales as one word."""
    from deep_comm._core import payload_dtypes

    own, other = payload_dtypes(record.expected), payload_dtypes(record.seen)
    idx = int(own[0] == other[0])
    return ConfigMismatch(
        ("dtype of x", "dtype of the scales")[idx],
        {record.rank: own[idx], record.peer: other[idx]},
        needs_reset(record),
    )


def from_record(record: ErrorRecord, begun_by_peer: tuple[int, str] = (-1, "")) -> DeepCommError:
    """The exception that says what the first failing thread of a Buffer recorded.

    begun_by_peer: of a timeout, a rank that runs another kernel instead, and which.
    """
    if record.kind == "masked_out":
        return MaskedOut(record.rank, record.kernel)
    if record.kind == "interrupted":
        return CallInterrupted(record.rank)
    if begun_by_peer[1]:
        return _different_calls(record, *begun_by_peer, needs_reset=True)
    if record.kind == "peer_timeout":
        return PeerTimeout(
            rank=record.rank,
            peer=record.peer,
            kernel=record.kernel,
            stage=record.stage,
            word=record.word,
            channel=record.channel,
            seen=record.seen,
            expected=record.expected,
            waited_s=record.waited_ns / 1e9,
        )
    if record.kind == "config_mismatch":
        field = record.word
        if record.kernel == "reset":  # bits of ranks
            bits = {record.rank: record.expected, record.peer: record.seen}
            named = {rank: _ranks_of(each) for rank, each in bits.items()}
            return ConfigMismatch(field, named, needs_reset=True)
        values: dict[int, Any] = {record.rank: record.expected, record.peer: record.seen}
        if field == "topk_weights":
            values = {rank: "given" if value else "none" for rank, value in values.items()}
        if field == "operation":
            if record.peer_kernel not in ("", record.kernel):
                return _different_calls(
                    record, record.peer, record.peer_kernel, needs_reset(record)
                )
            return _different_arguments(record)
        if field == "dtypes":
            return _different_dtypes(record)
        return ConfigMismatch(field, values, needs_reset(record))
    if record.kind == "expert_index":
        value = record.seen if record.index >= 0 else None
        return ExpertIndexError(
            record.peer, record.expected, value, record.index, num_topk=record.channel
        )
    if record.kind == "overflow":
        return CapacityError(record.rank, record.seen, record.expected)
    return DeepCommError(
        f"{record.kernel} failed on rank {record.rank}: {record.kind} in stage {record.stage}"
    )
