"""The host target: the protocol kernels over the SIMT executor, layout arithmetic,
shared memory, simulation.

Every pointer is an ``int`` address and 0 stands for "not given"; every size is in bytes or elements
as named. Nothing here knows torch. Calls that may wait release the GIL.
"""

from collections.abc import Callable, Sequence
from typing import Any

version: str
max_channels: int  # blocks of a kernel that talks to peers, at most
max_topk: int
max_low_latency_tokens: int  # of a rank in a low-latency call

class ErrorRecord:
    """What the first failing thread of a Buffer left behind."""

    kind: str  # "peer_timeout" | "config_mismatch" | "expert_index" | "overflow"
    kernel: str  # "notify_dispatch", "dispatch", "combine", "get_dispatch_layout"
    stage: str  # "entry_barrier", "counts", "ring_credit", "ring_tail", "channel_offsets", ...
    # the shared word it waited on: "arrived", "head", "tail", ...; config_mismatch: the field
    word: str
    rank: int  # who waited
    peer: int  # for whom (-1: nobody in particular)
    channel: int  # -1: none
    seen: int
    expected: int
    waited_ns: int
    index: int  # expert_index: position in topk_idx, -1 if a peer's; else -1
    peer_kernel: str  # word "operation": what the peer has entered; "": not known

class Engine:
    """The native half of a Buffer: workspace, generations, launches. One per (Buffer, rank)."""

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        device: int,  # CUDA device index; -1 on the host target
        peer_bases: Sequence[
            int
        ],  # [num_ranks] base address of every rank's heap segment, as this process sees it
        heap_bytes: int,
        num_max_experts: int,
        timeout_ns: int,
        begins_early: bool = True,  # launches may hold SMs while the one before them ends
        simulation: Simulation | None = None,  # host target only
    ) -> None: ...
    @staticmethod
    def workspace_bytes(*, num_ranks: int, num_max_experts: int) -> int:
        """Control words at the head of every segment; a segment is
        workspace_bytes + num_nvl_bytes.
        """
    @staticmethod
    def ring_bytes(
        *,
        num_ranks: int,
        num_channels: int,
        num_slots: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
    ) -> int:
        """Bytes of ring space one dispatch or combine of this shape needs in
        every rank's data region.
        """
    data_offset: int  # of the data region, from the segment's start
    data_bytes: int
    low_latency_hand_on_tokens: int  # between nodes: from so many on a token crosses once to a node
    smem_bytes_limit: int  # shared memory of a block; smaller values cut rows into more pieces
    skips_launches: bool  # for measuring the host's part: all is done but the launch
    begins_early: bool  # a launch of now may hold SMs while the one before it ends
    calls: object  # a door (csrc/bind/doors.hpp) for native calls; it keeps the engine
    num_launches: int  # kernels launched so far (tests assert "nothing launched" with it)

    traces_low_latency: bool  # its low-latency kernels note their steps
    def set_trace(self, slots: int, num_calls: int) -> None:
        """Blocks note their steps in trace_bytes(num_calls) zeroed bytes of the device, num_calls
        being a power of two. Before anything is launched.
        """
    def set_generation(self, generation: int) -> None:
        """Tests: the number of the last kernel, on all ranks alike, while none
        runs (see docs/design/0001).
        """
    rail_put_bytes: list[int]  # that this rank has put, [nodes, queues]
    @staticmethod
    def rail_workspace_bytes(
        *, num_nodes: int, ranks_per_node: int, num_max_experts: int
    ) -> int: ...
    def enable_internode(
        self,
        *,
        node: int,
        num_nodes: int,
        rail_bases: list[int],
        num_qps: int,
        num_bytes: int,
        are_all_near: bool,
        rail_pes: list[int] = ...,
        rail_kernels: int = 0,
        rail_base: int = 0,
        rail_qps: int = 0,
        nic_bytes_per_s: float = 0.0,
        is_alone: bool = False,
        is_near: bool = False,
    ) -> None:
        """The engine's ranks are those of one node; the heap's last num_bytes are the rail's.

        are_all_near: agreed, every rank's stores reach its peers on the rail.
        rail_pes to rail_qps: over NVSHMEM; rail_bases are then the
        addresses that stores reach, or 0.
        nic_bytes_per_s: the software NIC's limit; 0: none. is_alone: no other rank is a thread of
            this process. is_near: host target, stores instead of a network.
        """
    def quiet_rail(self) -> None: ...
    low_latency_bytes: int  # of the low-latency region; 0: not enabled
    max_ranks: int  # of any group
    masked_offset: int  # from the heap's start: int32 [max_ranks], ranks that this one does without
    votes_offset: int  # int32 [max_ranks, max_ranks]: [from, rank], the same of the others
    rail_masked_offset: int  # of a group of several nodes, both in one: int64 [R]
    def enable_low_latency(self, *, num_bytes: int, can_shrink: bool = False) -> None:
        """Take the last num_bytes of the heap, a multiple of 128. Once,
        before anything is launched.

        can_shrink: kernels do without ranks that stay silent."""
    def set_low_latency_sequence(self, sequence: int) -> None:
        """For tests: as if so many operations of each kind, at least 4, had run."""
    def reset_low_latency(self) -> None:
        """Zero the words and the region: nobody is masked. Callers put a
        barrier before and after it.
        """
    @staticmethod
    def low_latency_region_bytes(
        *,
        num_ranks: int,
        num_max_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        num_blocks: int,
        format: str,
        one_rounding: bool = False,  # room for combine's rows "selections" as well
        is_internode: bool = False,  # a group of several nodes
        can_shrink: bool = False,  # kernels do without ranks that stay silent
    ) -> int:
        """The smallest low-latency region that serves calls of this shape."""
    @staticmethod
    def low_latency_rail_workspace_bytes(*, num_ranks: int, num_max_experts: int) -> int:
        """Bytes of the words of low-latency mode in a group of several nodes, beside its region."""
    def low_latency_max_experts(self, *, num_topk: int) -> int:
        """The most experts that the kernels of a call can count in a block's shared memory, at most
        num_max_experts.
        """
    def note_interrupt(self) -> None:
        """A call ends in the middle, in Python: its kernel gives up, and the record says so."""
    def begun_by_peer(self) -> tuple[int, str]:
        """Of a recorded timeout: a rank that has begun an operation which this rank has not, while
        it has not begun this rank's, and that operation's kernel; else ""."""
    def poll_error(self) -> ErrorRecord | None:
        """The error record, if a thread has written one. Does not wait and does not clear."""
    def clear_error(self) -> None:
        """Forget a failure that left all ranks in step: every kind but
        "peer_timeout", which needs reset().
        """
    def reset(self) -> None:
        """Zero this rank's control words, generation and error record. Callers put a
        barrier before and after it. No rank is absent any more.
        """
    def shrink_barrier(self, *, absent: int, number: int, stream: int) -> None:
        """Launches a barrier of the ranks that are not in ``absent``, a bit each; see
        csrc/device/intranode/shrink_barrier.cuh.
        """
    def shrink_barrier_result(self) -> tuple[int, bool]:
        """Of the last shrink barrier, after its kernel: its number, whether all ranks agreed."""
    def do_without(self, *, absent: int) -> None:
        """reset(), except the words of the shrink barrier. Kernels launched from now on go on
        without these ranks. Call it between the first and the second shrink barrier.
        """
    def close(self) -> None:
        """Free what the engine owns on this rank. Never waits for a peer. Idempotent."""

def low_latency_available_blocks(num_sms: int, wanted: int | None) -> int:
    """Blocks that a low-latency call may have; ``wanted`` is taken as it is, unless it is None."""

class BufferCalls:
    """The calls of one Buffer; see csrc/host/calls."""

    def __init__(
        self,
        *,
        engine: object,  # Engine.calls
        order: StreamOrder,
        region: Region,
        device: object,  # torch.device
        exchange_api: object,  # DLPack's; None: this torch has none
        heap_base: int,
        heap_memory: object,  # what keeps this rank's part of the heap
        poisons: bool,
        rank: int,
        num_ranks: int,
        num_nodes: int,
        ranks_per_node: int,
        num_max_experts: int,
        num_nvl_bytes: int,
        num_ring_bytes: int,
        num_rdma_bytes: int,
        max_sms: int | None,
        rail_reads_late: bool,  # rows are put on the rail, not stored
        raise_recorded: Callable[[], None],
        event_overlap: Callable[..., object],
        event_of: Callable[[Event | None], object],
        handle_class: type,  # Handle
        tier_handle_class: type,  # InternodeHandle
        # (first tensor of a handle that does not say who made it) raises if rows go to absent ranks
        require_present: Callable[[Any], None],
    ) -> None: ...
    # Functions without keywords, whose arguments are listed in csrc/bind/calls_normal.cpp. Ask for
    # each once: a property makes it anew.
    get_dispatch_layout: Callable[..., Any]
    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    barrier: Callable[[int], None]
    # Those of csrc/bind/calls_tp.cpp.
    all_gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    all_reduce: Callable[..., Any]
    all_reduce_norm: Callable[..., tuple[Any, Any]]
    signal_word: Callable[[int, int], None]
    await_word: Callable[[int, int, int], None]
    begin_matmul: Callable[[int, int, int], None]
    push: Callable[[int, int, int, int, int], None]
    await_push: Callable[[int, int, int], None]
    add_slots: Callable[[int, int, int, int, int, int, int, int], None]
    end_matmul: Callable[[int], None]
    def set_staging(self, *, offset: int, num_bytes: int, multicast: int) -> None:
        """Where collectives stage: two parts of num_bytes, from the heap's base; and the address
        that stands for all heaps' bases, or 0."""
    def begin_reset(self) -> None:
        """Raise BufferInUse while another thread is in a call, or in a signal handler that
        interrupts one. Then no call begins until end_reset."""
    def end_reset(self) -> None: ...
    def require_no_call(self) -> None:
        """Raise BufferInUse as begin_reset."""
    is_in_use: bool  # a thread is in a call, or resets the Buffer
    def close(self, *, may_be_in_use: bool) -> None:
        """No call begins any more. Raise BufferInUse as begin_reset, unless may_be_in_use."""
    has_pending: bool  # a dispatch has been sent, and not been received
    # of dispatch: calls with room in the region, and without; of combine; most bytes without room
    region_use: tuple[int, int, int, int, int]
    def warn_without_room(self, warn: Callable[[int], None]) -> None:
        """Call ``warn(bytes)`` once, for the first large call without room. It must not hold what
        holds the Buffer's calls."""
    def set_members(self, members: Sequence[str]) -> None:
        """Who makes handles from now on: see deep_comm/context/absent.py."""
    def agree_on_tokens(self, num_tokens: int) -> None:
        """That a rank will ever bring, as all of them say."""
    def end_calls(self, *, was_destroyed: bool) -> None:
        """Goes on without a dispatch that has not been received, and without what all ranks have
        seen alike so far. Kernels have ended.
        """
    def set_absent(self, ranks: Sequence[int]) -> None:
        """Ranks that the Buffer does without, in ascending order."""

class DispatchRecord:
    """What a dispatch learned, as calls use it; see csrc/host/dispatch_record.hpp."""

    is_expanded: bool
    num_channels: int
    num_tokens: int
    num_recv_rows: int
    num_forward_rows: int
    num_output_rows: int
    def field(self, name: str) -> Any:
        """A field of Handle, InternodeHandle or Expansion; None: not known. Makes tensors anew."""

class LowLatencyRecord:
    """What a low-latency dispatch learned: LowLatencyHandle is a view of it."""

    num_tokens: int
    num_max_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    is_compact: bool
    rank: int
    members: tuple[str, ...]
    rows_shape: tuple[int, ...]  # of what combine takes
    metadata: Any  # int32, flat: the block that parts lie in
    def part(self, name: str) -> Any:
        """A tensor of a part, made anew; None: calls of this form have none of the name. Names,
        types and shapes are in csrc/host/calls/low_latency.cpp.
        """

class LowLatencyCalls:
    """The low-latency calls of one Buffer; see csrc/host/calls/low_latency.hpp."""

    def __init__(
        self,
        buffer: BufferCalls,
        *,
        framework: Framework,
        can_shrink: bool,  # the Buffer has rank masks
        num_wanted_blocks: int | None,
        handle_type: Callable[[LowLatencyRecord], object],
        tensors_event: Callable[..., object] | None,  # (event, tensors, the stream that owns these)
    ) -> None: ...
    # Functions without keywords. Ask for each once: a property makes it anew.
    dispatch: Callable[..., Any]  # (x, topk_idx, num_max_tokens, num_experts, cumulative_stats,
    # wait_stats, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook, topk_weights,
    # compact, report_num_tokens, use_nvfp4, global_scale, global_topk_idx)
    combine: Callable[..., Any]  # (x, topk_idx, topk_weights, handle, use_logfmt, zero_copy,
    # async_finish, return_recv_hook, out, wait_stats, one_rounding)
    wait_num_tokens: Callable[[], int]
    num_forms: int  # shapes and options of calls so far
    has_pending: bool  # a hook has not run
    def num_blocks(
        self, num_max_tokens: object, hidden: object, num_topk: object, num_experts: object
    ) -> int:
        """Blocks of a BF16 call. Raises what the call would."""
    def combine_buffer(self, handle: object) -> Any:
        """What is kept for handles of this shape, or None. Raises ArgumentError: not a handle of
        this rank of this group.
        """
    def keep_combine_buffer(self, handle: object, buffer: object) -> None: ...
    def forget_pending(self, *, was_destroyed: bool) -> None:
        """Hooks from before a reset have nothing left to receive."""

class Decoded:
    """What combine needs of a layer's decode batch."""

    record: LowLatencyRecord
    exchange: int  # that its ranks have told of; 0: none

class Prefilled:
    """What combine needs of a layer's prefill batch, and tensors of it that are made when they are
    asked for."""

    num_tokens_per_expert: Any  # int32 [L]
    offsets: Any  # int32 [L + 1]
    weights: Any  # float32 [S], of each row
    handle: Any  # of the dispatch
    max_num_tokens: int | None  # of all ranks; None: the host has not waited
    def weighed_by(self, weights: object) -> Prefilled:
        """A copy with these weights, as autograd knows them."""

class LayerCalls:
    """What the steps of one layer are made of; see deep_comm/layer/calls.py."""

    def __init__(
        self,
        *,
        buffer: BufferCalls,
        low_latency: LowLatencyCalls | None,  # None: the layer does not decode
        shape: object,  # MoEShape
        alignment: int,
        max_recv_rows: int,
        batch_type: type,  # ExpertBatch
        decode_values: dict[str, Any],  # what all batches of a mode hold
        prefill_values: dict[str, Any],
        # ("dispatch" or "combine") -> (Config or DefaultConfig, somebody named a number of SMs)
        default_config: Callable[[str], tuple[Any, bool]],
        learn: Callable[[int], bool],  # ModeRule.learn
        # What a rank with too many tokens for a decode step sends: indices of int64, of int32
        nowhere: Sequence[object],
        no_weights: object,
    ) -> None: ...
    # Functions without keywords. Ask for each once: a property makes it anew.
    decode: Callable[..., Any]
    begin_decode: Callable[..., Any]
    prefill: Callable[..., Any]
    begin_prefill: Callable[..., Any]
    combine: Callable[..., Any]
    begin_combine: Callable[..., Any]
    finish: Callable[..., Any]
    def use_counters(self, counters: HostCounters | None) -> None: ...

class Framework:
    """What calls ask of the program's tensor library."""

class TorchFramework(Framework):
    """torch, for one Buffer on one device."""

    def __init__(
        self,
        *,
        device: Any,  # torch.device
        comm_stream: Any,  # torch.cuda.Stream; None on a target without streams
        exchange_api: Any,  # torch.Tensor.__dlpack_c_exchange_api__; None: this torch has none
        # the current stream of the device; None: as torch says, and 0 on the host
        current_stream: Callable[[], int] | None,
    ) -> None: ...

def payload_dtypes(word: int) -> tuple[Any, Any]:
    """torch.dtypes of x and of its scales (None: without), from the word that ranks compare."""

class Segment:
    """A POSIX shared memory segment, mode 0600, with an unguessable name."""

    name: str
    address: int
    num_bytes: int
    @staticmethod
    def create(num_bytes: int) -> Segment: ...
    @staticmethod
    def attach(name: str, num_bytes: int) -> Segment: ...
    def unlink(self) -> None:
        """Remove the name (every rank has attached); the memory lives until
        the last close. Idempotent.
        """
    def close(self) -> None: ...

def remove_stale_segments() -> list[str]:
    """Remove this user's segments whose creating process is gone; returns their names."""

class HostCounters:
    """One rank's view of counters that the ranks of a host share; see
    deep_comm/layer/host_counters.py."""

    def __init__(self, segment: Segment, rank: int, num_ranks: int) -> None:
        """``segment``: num_bytes(num_ranks) zeroed bytes."""
    @staticmethod
    def num_bytes(num_ranks: int) -> int: ...
    def publish(self, num_tokens: int) -> int:
        """Publish the tokens of the next exchange and return its number. Call it when the launch is
        certain, because peers may act on it at once."""
    def max(self, exchange: int) -> int | None:
        """The largest number of tokens of any rank; None if some rank has not published its number
        within 200 us, in which the GIL is free."""
    def exchange(self) -> int:
        """This rank's last published exchange."""
    def set_exchange(self, exchange: int) -> None: ...

class Event:
    """A point in the work of a stream. Events of CUDA are reused: making one is cheap."""

    def record(self, stream: int) -> None: ...
    def wait(self, stream: int) -> None:
        """Work that ``stream`` gets from now on waits for this event."""

    def synchronize(self) -> None:
        """The calling thread waits for what was recorded."""

    def has_passed(self) -> bool:
        """Whether what was recorded has happened."""

    def order(self, first: int, then: int) -> None:
        """Work that stream ``then`` gets from now on waits for all that ``first`` has."""

class Streams:
    """Those of one device, as ``int``; 0 is the default one."""

    def __init__(self, door: object) -> None:
        """``door``: of _core.streams or _cuda.streams."""
    door: object
    def is_capturing(self, stream: int) -> bool: ...
    def capture_check(self, device: int, exchange_api: object) -> Callable[[], bool] | None:
        """Whether torch's current stream of the device is capturing. ``exchange_api``: DLPack's;
        None without one."""

    def mark(self, stream: int) -> Event:
        """An event at this point of a stream, whichever device is current. In a capture it means
        something to streams of that capture alone."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

class StreamOrder:
    """Orders the calls of one Buffer among streams. Native calls hold it."""

    def __init__(
        self,
        streams: object,  # a door: see `streams`
        framework: Framework,
        comm: int,  # the communication stream
    ) -> None: ...
    door: object  # for native code
    def synchronize(self) -> None:
        """Wait for the last call, which all others come before, and for what may be graphs."""

def streams() -> object:
    """A door (csrc/bind/doors.hpp) to the streams of the host target, which has none."""

class Block:
    """Bytes of the heap, given back when the last reference goes."""

    offset: int
    num_bytes: int
    def shrink(self, num_bytes: int) -> None:
        """Give back what lies behind the first num_bytes; nobody but the
        block's own stream has used it.
        """

class Region:
    """First-fit allocator of 128-byte aligned blocks in [begin, end).

    A block may be given back while kernels that read it are still queued: an event is recorded
    then on the current stream and on the one that was current when the block was taken, and whoever
    gets the bytes next waits for both. Blocks taken while the current stream is capturing are only
    handed out to the same or later captures: replays of the CUDA graph write to them whenever they
    like.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        streams: object,  # a door: see `streams`
        framework: Framework,
    ) -> None: ...
    def allocate(
        self, num_bytes: int, is_behind_caller: bool = False
    ) -> tuple[Block, list[Event]] | None:
        """A block and the events to wait for before anything writes to it;
        None if there is no room.

        ``is_behind_caller``: the work comes after all that is queued on the current stream, whose
        events are left out.
        """
    num_free_bytes: int

def bytes_capsule(
    address: int,
    num_bytes: int,
    device_type: int,  # DLPack's
    device_index: int,
    owner: object,  # lives as long as the last tensor over the memory
) -> object:
    """A DLPack capsule for torch.from_dlpack: memory that somebody else owns, as uint8
    [num_bytes]."""

def allocate(num_bytes: int) -> int:
    """Zeroed, 4096-byte aligned memory of this process: the heap of ranks that are threads."""

def free(address: int) -> None: ...

class RailTraffic:
    """What one rank has posted on one queue of the simulated network."""

    rank: int
    node: int  # where it went
    qp: int
    num_puts: int
    num_put_bytes: int
    num_signals: int

class Simulation:
    """All ranks of a job in this process under one seeded scheduler.

    Each rank is one OS thread. Only one of {a rank's thread, the scheduler} acts at a time as far
    as results can tell, so that a seed replays a run exactly.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        seed: int,
        # "random" | "fifo" | "lifo" | "starve" | "priority" | "any" (chosen by the seed)
        policy: str = "random",
        weak_memory: bool = True,  # hold stores that are not releases; read what was there before
        delay_bulk: bool = True,  # complete bulk copies late
        collectives_order_memory: bool = False,  # shuffles and votes, as sync_warp
        # A store to global memory that an earlier load could see is an error without it.
        allow_late_loads: bool = False,
        find_races: bool = False,  # in shared memory; needs a build with DEEP_COMM_FIND_RACES=ON
        faults: Sequence[str] = (),  # names of Fault: "weaken_release", "skip_credit", ...
        stalls: Sequence[
            tuple[int, int, int]
        ] = (),  # (rank, after step, for so many steps); 0 steps: for ever
        # "report": raise SimulationStuck; "clock": jump to the next deadline
        on_stuck: str = "report",
        weaken: str = "",  # "file:line:op:relaxed" or "file:line:op:narrow"
        note_sites: bool = False,  # for visited_sites
    ) -> None: ...
    num_steps: int  # fiber switches so far
    time_ns: int  # virtual clock
    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        """All-gather between the rank threads. Raises SimulationStuck if
        a rank can no longer come.
        """
    def leave(self, rank: int) -> None:
        """The rank's thread ends (or died); it takes part in nothing any more."""
    def stall_rail(self, rank: int) -> None:
        """The rank's NIC delivers nothing any more."""
    def rail_traffic(self) -> list[RailTraffic]:
        """What the ranks have posted on the network so far, by queue."""
    def visited_sites(self) -> list[str]:
        """Where kernels came to an operation that orders something: "file:line:op"."""
    def kill(self, rank: int) -> None:
        """The rank's fibers stop where they are and never run again, like
        a process that was killed.
        """
    def describe(self) -> str:
        """Every waiting fiber: kernel, rank, block, warp, word, seen, expected."""

def run_example(
    simulation: Simulation,
    *,
    name: str,  # "one_flag" | "ring"
    rank: int,  # 0 sends, 1 receives
    memory: int,  # zeroed; see csrc/device/examples
    num_words: int,
    num_rows: int = 0,
    num_slots: int = 1,
    num_threads: int = 32,
) -> None:
    """One rank's half of an example on a simulated machine, to its end. Without the GIL."""

class MachineError(RuntimeError):
    """A kernel broke a rule of the machine (divergent barrier, bulk copy out of
    its shared memory, trap...).
    """

class SimulationStuck(MachineError):
    """No fiber can make progress. The message lists every waiting fiber and the seed."""

# The rules of two tiers that deep_comm.scale counts with; csrc/device/layout/rail.cuh
# and internode/notify.cuh.

def channel_range(num_tokens: int, num_channels: int, channel: int) -> tuple[int, int]:
    """Tokens [begin, end) of a channel."""

def dispatch_node(node: int, channel: int, step: int, num_nodes: int) -> int:
    """To which node a channel of ``node`` sends at a step of dispatch."""

def combine_node(channel: int, step: int, num_nodes: int) -> int:
    """To which node's tokens a channel adds at a step of combine; the same on all nodes."""

def dispatch_slot_bytes(row_bytes: int, scale_row_bytes: int, num_topk: int) -> int:
    """Bytes of a dispatched row on the rail, padding included."""

def dispatch_row_bytes(row_bytes: int, scale_row_bytes: int, num_topk: int) -> int:
    """Bytes of a dispatched row that are copied inside a node."""

def combine_slot_bytes(row_bytes: int, num_topk: int) -> int:
    """Bytes of a node's sum on the rail, padding included."""

def notify_bytes(num_channels: int, ranks_per_node: int, num_node_experts: int) -> int:
    """Bytes of counts that a notify puts to a node with that many experts."""

def low_latency_slot_bytes(row_bytes: int, num_scales: int, num_topk: int) -> int:
    """Bytes of a low-latency message between nodes: row, scales and routes."""

def low_latency_count_bytes(num_local_experts: int) -> int:
    """Bytes of counts that a low-latency dispatch puts to a rank with that many experts."""

# What blocks note while they run; csrc/device/layout/trace.cuh.

trace_steps: tuple[str, ...]
kernel_names: tuple[str, ...]

def trace_bytes(num_calls: int) -> int:
    """Bytes of a rank's rings."""

def read_trace(slots: int, num_calls: int) -> list[tuple[int, int, int, int, int, int]]:
    """Kernel, call, block, step, time in ns and value of every note in a copy of the rings in host
    memory, of calls that no later one has begun to overwrite.
    """

def trace_wait(value: int) -> tuple[str, str, int]:
    """Stage, word and peer (-1: none) of a note of ``gave_up``. Raises ValueError."""
