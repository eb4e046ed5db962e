"""The host target: the protocol kernels over the SIMT executor, layout arithmetic,
shared memory, simulation.

Every pointer is an ``int`` address and 0 stands for "not given"; every size is in bytes or elements
as named. Nothing here knows torch. Calls that may wait release the GIL.
"""

from collections.abc import Callable, Sequence
from typing import Any

version: str

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

class OutputLayout:
    """Offsets of a dispatch's outputs in their block, and its size, in bytes."""

    x: int
    scales: int
    topk_idx: int
    topk_weights: int
    num_bytes: int

class SourceLayout:
    """Offsets in the block that belongs to the handle of an expanded
    dispatch, and its size, in bytes.
    """

    recv_rows: int
    num_bytes: int

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
    @staticmethod
    def staging_row_bytes(*, row_bytes: int, num_topk: int) -> int:
        """Bytes of one row in combine's staging."""
    @staticmethod
    def output_layout(
        *, num_rows: int, row_bytes: int, scale_row_bytes: int, num_topk: int, topk_idx_bytes: int
    ) -> OutputLayout:
        """How the outputs of a dispatch lie in a block of the receive region."""
    low_latency_hand_on_tokens: int  # between nodes: from so many on a token crosses once to a node
    smem_bytes_limit: int  # shared memory of a block; smaller values cut rows into more pieces
    skips_launches: bool  # for measuring the host's part: all is done but the launch
    def error_flag(self) -> Sequence[int]:
        """[0] is not 0 when poll_error() has something. Not after close()."""
    begins_early: bool  # a low-latency launch of now may begin while the one before it ends
    num_launches: int  # kernels launched so far (tests assert "nothing launched" with it)

    # What a call of normal mode has in common with others of its form is planned once. Plans are
    # functions of the plain numbers that csrc/bind/bind_normal.hpp lists (and ops/plans.py):
    # addresses, sizes, the stream last.
    def plan_layout(self) -> Callable[..., None]: ...
    def plan_notify(
        self,
        *,
        num_channels: int,
        num_send_tokens: int,  # chunk: rows between two publications of a tail
        num_slots: int,  # ring slots per (channel, source)
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
        topk_idx_bytes: int,
        num_experts: int,
        expert_alignment: int,
        counts_choices: bool,  # from topk_idx; else the layout is given
        is_expanded: bool,
    ) -> Callable[..., None]: ...
    traces_low_latency: bool  # its low-latency kernels note their steps
    def set_trace(self, slots: int, num_calls: int) -> None:
        """Blocks note their steps in trace_bytes(num_calls) zeroed bytes of the device, num_calls
        being a power of two. Before anything is launched.
        """
    def set_generation(self, generation: int) -> None:
        """Tests: the number of the last kernel, on all ranks alike, while none
        runs (see docs/design/0001).
        """
    def counts_waiter(self) -> Callable[[], tuple[int, int, bool, list[int]] | None]:
        """What waits for the totals of the last notify_dispatch, without the GIL, and returns the
        fields of ops.notify.Counts. None: it failed, see poll_error().
        """
    def plan_dispatch(
        self,
        *,
        num_channels: int,
        num_send_tokens: int,
        num_slots: int,
        row_bytes: int,
        scale_bytes: int,  # bytes of one scale: 1, 2, 4 or 8
        num_scales: int,  # scales of one row
        num_topk: int,
        topk_idx_bytes: int,
        makes_handle: bool,  # there is recv_src_idx
        is_expanded: bool,
        is_quantised: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Callable[..., None]: ...
    place_bytes: int  # what expanded outputs add to a row's metadata, at most
    @staticmethod
    def source_layout(*, num_rows: int, num_topk: int) -> SourceLayout:
        """How the source tokens and recv_rows of an expanded dispatch lie in a
        block of the receive region.
        """
    @staticmethod
    def numbering_layout(
        *, num_ranks: int, num_experts: int, num_local_experts: int, num_tokens: int, num_topk: int
    ) -> tuple[int, int, int, int, int, int, int]:
        """Bytes to expert_offsets, expert_counts, num_expanded, first_rows, send_row and send_rows,
        and of all."""
    def expand_calls(self) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
        """``number_rows``, ``expand_rows`` and ``reduce_experts`` of positional numbers, in the
        order of the methods' arguments; dtype: 0 bfloat16, 1 float16, 2 float32."""
    def number_rows(
        self,
        *,
        topk_idx: int,  # [num_tokens, num_topk]
        topk_idx_bytes: int,
        num_tokens: int,
        num_topk: int,
        num_experts: int,
        first_rows: int,  # int32 [num_experts], of notify_dispatch
        send_row: int,  # out int32 [num_tokens, num_ranks]
        send_rows: int,  # out int32 [num_tokens, num_topk]
        num_channels: int,
        stream: int,
    ) -> None: ...
    def expand_rows(
        self,
        *,
        rank_prefix_matrix: int,
        recv_rows: int,  # int32 [num_tokens_limit, num_topk]
        expert_offsets: int,
        expert_counts: int,
        num_topk: int,
        num_local_experts: int,
        num_rows: int,  # M
        num_tokens_limit: int,  # N
        row_bytes: int,
        scale_row_bytes: int,
        zero_padding: bool,
        x: int,  # [M, row_bytes], the first row of every token in place
        scales: int,  # [M, scale_row_bytes], or 0
        expert_idx: int,  # out [M], or 0
        expert_idx_bytes: int,
        weights: int,  # float32 [M], or 0: zeros where a row belongs to no token
        fill_src_idx: int,  # int32 [N], or 0: -1 past the received tokens
        fill_rows: int,  # int32 [N, num_topk], likewise
        num_channels: int,
        stream: int,
    ) -> None: ...
    def number_received(
        self,
        *,
        num_received: int,  # int32 [1]
        topk_idx: int,  # [num_tokens_limit, num_topk], local experts
        topk_idx_bytes: int,
        num_tokens_limit: int,  # N
        num_topk: int,
        num_local_experts: int,
        expert_alignment: int,
        num_rows: int,  # M
        expert_offsets: int,  # out int32 [num_local_experts + 1]
        expert_counts: int,  # out int32 [num_local_experts]
        recv_rows: int,  # out int32 [num_tokens_limit, num_topk]
        num_channels: int,
        stream: int,
    ) -> None:
        """Between nodes: places of rows that have come without."""
    def expand_received(
        self,
        *,
        num_received: int,  # int32 [1]
        recv_x: int,  # [num_tokens_limit, row_bytes]
        recv_scales: int,  # [num_tokens_limit, scale_row_bytes], or 0
        recv_weights: int,  # float32 [num_tokens_limit, num_topk], or 0
        recv_rows: int,
        expert_offsets: int,
        expert_counts: int,
        num_topk: int,
        num_local_experts: int,
        num_rows: int,  # M
        num_tokens_limit: int,  # N
        row_bytes: int,
        scale_row_bytes: int,
        zero_padding: bool,
        x: int,  # out [M, row_bytes]
        scales: int,  # out [M, scale_row_bytes], or 0
        expert_idx: int,  # out [M], or 0
        expert_idx_bytes: int,
        weights: int,  # out float32 [M], or 0
        num_channels: int,
        stream: int,
    ) -> None:
        """Between nodes: rows to all of their places."""
    def transpose_scales(
        self,
        *,
        src: int,  # [num_rows, num_columns] words of 4 bytes
        dst: int,  # out [num_columns, column_stride]
        num_rows: int,
        num_columns: int,
        column_stride: int,
        num_channels: int,
        stream: int,
    ) -> None: ...
    def reduce_experts(
        self,
        *,
        rank_prefix_matrix: int,  # int32 [num_ranks, num_ranks]; between nodes [1]: rows received
        recv_rows: int,
        num_topk: int,
        num_rows: int,
        num_tokens_limit: int,
        dtype: str,
        hidden: int,
        x: int,  # [M, hidden]
        row_weights: int,  # float32 [M] to multiply with, or 0
        reduced_x: int,  # out [N, hidden]
        weights: int,  # float32 [M], or 0
        reduced_weights: int,  # out float32 [N, num_topk], or 0
        num_channels: int,
        stream: int,
    ) -> None: ...
    def plan_combine(
        self,
        *,
        num_channels: int,
        num_send_tokens: int,
        num_slots: int,
        dtype: str,  # "bfloat16" | "float16" | "float32"
        row_bytes: int,
        num_topk: int,
        few_rows: int = 0,  # that a rank returns, at most, for it to run on
        few_rows_sms: int = 0,
    ) -> Callable[..., None]: ...
    has_rail: bool  # this target reaches other nodes
    rail_put_bytes: list[int]  # that this rank has put, [nodes, queues]
    @staticmethod
    def rail_workspace_bytes(
        *, num_nodes: int, ranks_per_node: int, num_max_experts: int
    ) -> int: ...
    @staticmethod
    def rail_ring_bytes(
        *,
        num_nodes: int,
        num_channels: int,
        num_slots: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
    ) -> int: ...
    @staticmethod
    def two_tier_ring_bytes(
        *,
        ranks_per_node: int,
        num_channels: int,
        num_slots: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
    ) -> int: ...
    def enable_internode(
        self,
        *,
        node: int,
        num_nodes: int,
        rail_bases: list[int],
        num_qps: int,
        num_bytes: int,
        rail_pes: list[int] = ...,
        rail_kernels: int = 0,
        rail_base: int = 0,
        rail_qps: int = 0,
        nic_bytes_per_s: float = 0.0,
        is_alone: bool = False,
        is_near: bool = False,
    ) -> None:
        """The engine's ranks are those of one node; the heap's last num_bytes are the rail's.

        rail_pes to rail_qps: over NVSHMEM; rail_bases are then the
        addresses that stores reach, or 0.
        nic_bytes_per_s: the software NIC's limit; 0: none. is_alone: no other rank is a thread of
            this process. is_near: host target, stores instead of a network.
        """
    def quiet_rail(self) -> None: ...
    def internode_places(
        self,
        *,
        is_token_in_rank: int,
        num_tokens: int,
        num_channels: int,
        send_places: int,
        stream: int,
    ) -> None:
        """Launch the kernel that makes send_places of a layout."""
    @staticmethod
    def tier_source_layout(*, num_rows: int) -> tuple[int, int]:
        """Where recv_src_meta begins behind recv_src_idx, and bytes of both."""
    def tier_counts_waiter(self) -> Callable[[bool], tuple[Any, ...] | None]:
        """As counts_waiter, of the last notify between nodes. The argument: was a dispatch launched
        behind it, which says whether it has sent?"""
    def plan_internode_layout(self) -> Callable[..., None]:
        """Numbers as of plan_layout."""
    def plan_internode_notify(self, **form: int) -> Callable[..., None]:
        """Numbers as in ops/internode_plan.py; see InternodeNotifyArgs."""
    def plan_internode_dispatch(self, **form: int) -> Callable[..., None]:
        """Numbers as in ops/internode_plan.py; see InternodeDispatchArgs."""
    def plan_internode_combine(self, *, dtype: str, **form: int) -> Callable[..., None]:
        """Likewise; see InternodeCombineArgs."""
    low_latency_bytes: int  # of the low-latency region; 0: not enabled
    max_ranks: int  # of any group
    masked_offset: int  # from the heap's start: int32 [max_ranks], ranks that this one does without
    votes_offset: int  # int32 [max_ranks, max_ranks]: [from, rank], the same of the others
    rail_masked_offset: int  # of a group of several nodes, both in one: int64 [R]
    def enable_low_latency(
        self, *, num_bytes: int, can_shrink: bool = False, begins_early: bool = True
    ) -> None:
        """Take the last num_bytes of the heap, a multiple of 128. Once,
        before anything is launched.

        can_shrink: kernels do without ranks that stay silent. begins_early: launches may hold SMs
        while the one before them ends."""
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
    def plan_low_latency(
        self,
        *,
        num_max_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        num_blocks: int,  # equal on all ranks
        format: str,  # "bfloat16" | "fp8" | "nvfp4"
        round_scale: bool,
        use_ue8m0: bool,
        is_compact: bool,
        has_weights: bool,  # they travel with dispatch
    ) -> LowLatencyPlan:
        """Check a shape and its options, once for all calls with them."""
    def quick_low_latency(
        self,
        tensor_type: type,
        exchange_api: object,  # DLPack's, of that type
        empty: Callable[..., object],  # (shape, strides, dtype): on the current device
        part: Callable[..., object],  # (tensor, shape, strides, offset)
        device_type: int,  # as DLPack counts them
        device_index: int,
        *,
        empty_address: int,  # of tensors without elements
        pending_dispatches: list[object],  # of hooks that have not run, an entry each
        pending_combines: list[object],
        refuse_hook: Callable[[], object],  # raises, for a hook that may not run
        end: Callable[[], object] | None,  # called behind every launch
        bfloat16: object,
        int32: object,
        handle_type: Callable[..., object],  # (shape, metadata, num_tokens)
        event_type: type,  # of calls without an event; its instances need no __init__
        outputs_event: Callable[..., object],  # (outputs): of a call that fills these
        streams: object,  # this and the next: as QuickNormal's
        current_stream: Callable[[int], int] | None,
        is_ready: Callable[[int, int], bool] | None,
        record: Callable[[int], object] | None,
    ) -> QuickLowLatency: ...
    def wait_low_latency_num_tokens(self) -> int | None:
        """The most tokens any rank had in the last reporting dispatch; None: a
        kernel failed. Without the GIL.
        """
    def note_interrupt(self) -> None:
        """A call ends in the middle, in Python: its kernel gives up, and the record says so."""
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
    def meet(self, *, absent: int, number: int, stream: int) -> None:
        """Launches a meeting of the ranks that are not in ``absent``, a bit each; see
        csrc/device/intranode/shrink_barrier.cuh.
        """
    def meeting(self) -> tuple[int, bool]:
        """Of the last meeting, once its kernel has ended: its number, whether all have met."""
    def do_without(self, *, absent: int) -> None:
        """reset(), but for the words of meetings; kernels launched from now on go on without these
        ranks. Between a first and a second meeting.
        """
    def close(self) -> None:
        """Free what the engine owns on this rank. Never waits for a peer. Idempotent."""

def expanded_choices(
    num_ranks: int,
    most_rows: int,
    num_tokens: int,
    places: int,
    num_experts: int,
    expert_alignment: int,
) -> tuple[int, int]:
    """See csrc/host/likely_rows.hpp. The next one is not larger; 0: there is none."""

class QuickNormal:
    """Calls of normal mode in one step each, of one Buffer; see csrc/bind/bind_quick_normal.cpp.

    The functions of ``calls`` return None, and nothing has happened, for whatever is not a plain
    call of a form that ``add_*`` was told of.
    """

    def __init__(
        self,
        tensor_type: type,
        exchange_api: object,  # DLPack's, of that type
        empty: Callable[..., object],  # (shape, strides, dtype): on the current device
        part: Callable[..., object],  # (tensor, shape, strides, offset)
        device_type: int,  # as DLPack counts them
        device_index: int,
        *,
        num_ranks: int,
        ranks_per_node: int,
        heap_base: int,
        memory: object,  # kept by tensors over the heap
        take: Callable[..., object],  # Region.taker()
        count_layout: Callable[..., None],  # Engine.plan_layout() or plan_internode_layout()
        streams: object,  # backends.cuda_launch.Streams; None: there are none
        current_stream: Callable[[int], int] | None,  # of a device
        is_ready: Callable[[int, int], bool] | None,  # (device, stream)
        record: Callable[[int], None] | None,  # on a stream, the event that is `done`
        likely_rows: Callable[[int], tuple[int, ...]],  # ExpectedRows.choices
        expected: object,  # ExpectedRows
        likely_forwarded: Callable[[int], int],  # .forwarded
        wait_counts: Callable[[], object],  # Engine.counts_waiter()
        wait_tier_counts: Callable[[bool], object],  # Engine.tier_counts_waiter()
        expand_calls: tuple[Callable[..., None], ...],  # Engine.expand_calls()
        float32: object,  # torch's
        int32: object,
        uint8: object,
    ) -> None: ...
    def layout(
        self,
        *,
        num_ranks: int,
        num_nodes: int,
        num_max_experts: int,
        num_max_topk: int,
        int32: object,  # torch's dtypes
        boolean: object,
        event_type: type,  # EventOverlap
        is_synchronous: bool,  # Backend.is_synchronous
    ) -> Callable[[object, object, object, object], Any]:
        """Context, topk_idx, num_experts, asynchronous -> num_tokens_per_rank, num_tokens_per_node
        or None, num_tokens_per_expert, is_token_in_rank and, of a synchronous call, its event.
        """
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """``asynchronous``: StreamOptions.asynchronous.
        ``dispatch(x, KnownHandle.numbers, home_stream, config, default, asynchronous,
        zero_padding)`` -> what has come.
        ``new_dispatch(x, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_expert,
        is_token_in_rank, num_experts, num_worst_tokens, expert_alignment, zero_tail, config,
        default, asynchronous, expand, zero_padding)`` -> (SlabLayout, its address, its block,
        routing, stream, num_topk, with expand (storage of a Numbering, expert_offsets,
        expert_counts), receive); ``receive(Context.owner, Handle.has_default_sms)``, once, ->
        (rows, indices, weights, counts, number of rows, address of recv_rows, Handle._native).
        Without num_worst_tokens it waits for the counts; None: a kernel failed. No rows: then, and
        where they have not moved, as some rank had no room for its own.
        ``combine(x, topk_weights, KnownHandle.numbers, home_stream, config, default,
        asynchronous, apply_weights)`` -> (sums, sums of weights).
        """

    def layer(
        self,
        *,
        context: object,  # the Buffer's
        buffer: object,
        default_of: Callable[[str, None], object],  # Buffer._default
        default_config_type: type,
        is_synchronous: bool,  # Backend.is_synchronous
        finish_unmoved: Callable[..., object],  # see layer/quick_prefill.py
        maker: object,  # of handles, as told_of_batch gives it back
        dtype: tuple[int, int],  # DLPack's code and bits
        hidden: int,
        max_tokens: int,
        num_topk: int,
        num_experts: int,
        max_rows: int,  # of a bounded call
        alignment: int,
        batch_type: type,  # ExpertBatch, and what is alike in all of them
        common: dict[str, Any],
        state_type: type,  # Prefilled
        rule: object,  # ModeRule
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """begin and end of PrefillCalls."""
    @staticmethod
    def told_of_batch(made: object) -> tuple[Any, ...]:
        """Of Prefilled._made: the arguments of quick_prefill._handle_of."""

    def handled_calls(
        self,
        *,
        is_internode: bool,
        event_type: type,  # EventOverlap
        is_synchronous: bool,  # Backend.is_synchronous
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Of synchronous calls along a handle, their Context given: ``dispatch(Context, handle, x,
        config, default, zero_padding, cast)`` and ``combine(Context, handle, x, topk_weights,
        config, default, apply_weights)`` return what Buffer's methods do, or None."""

    def tier_calls(self) -> tuple[Callable[..., Any], ...]:
        """The same between nodes, with KnownTierHandle.numbers. ``new_dispatch`` takes
        num_tokens_per_rdma_rank as well and returns (TierSlabLayout, its address, its block,
        KnownTierHandle.routing, addresses of send_nvl_head and recv_src_idx, rows that there is
        room for, received and forwarded, stream, num_topk, receive); ``receive()`` -> (rows,
        indices, weights, counts).
        """

    def add_dispatch(
        self,
        *,
        config: object,
        default: object,  # where there is no config
        dtype: tuple[int, int],  # DLPack's code and bits
        scale_dtype: tuple[int, int],
        hidden: int,
        num_scales: int,  # 0: without
        num_channels: int,
        num_local_blocks: int,
        is_expanded: bool,
        cast: int = 0,  # ScaleOptions.cast
        launch: Callable[..., None],  # of the plan
    ) -> None: ...
    def add_tier_dispatch(self, **form: Any) -> None:
        """As add_dispatch, between nodes."""
    def add_new_tier_dispatch(self, **form: Any) -> None:
        """As add_new_dispatch, between nodes."""
    def add_tier_combine(self, **form: Any) -> None:
        """As add_combine, between nodes."""
    def add_new_dispatch(
        self,
        *,
        config: object,
        default: object,
        dtype: tuple[int, int],
        scale_dtype: tuple[int, int],
        hidden: int,
        num_scales: int,
        num_topk: int,
        num_experts: int,
        alignment: int,
        idx_bytes: int,
        has_layout: bool,
        is_expanded: bool,
        num_local_experts: int,
        num_local_blocks: int,
        cast: int,
        notify: Callable[..., None] | None,
        launch: Callable[..., None],
        slab_of: Callable[[int], object],  # SlabLayout for so many tokens
    ) -> None: ...
    def add_combine(
        self,
        *,
        config: object,
        default: object,
        dtype: tuple[int, int],
        torch_dtype: object,
        hidden: int,
        num_topk: int,  # of weights that come along; 0: none do
        num_channels: int,
        num_local_blocks: int,
        has_default_sms: bool,  # Handle.has_default_sms
        staging_row_bytes: int,
        launch: Callable[..., None],
    ) -> None: ...

class QuickLowLatency:
    """Low-latency calls of one engine in one step each, see csrc/bind/quick_low_latency.hpp.

    None, and nothing has happened, for whatever is not a plain call of a form that was added.
    """

    def add(
        self,
        plan: LowLatencyPlan,
        shape: object,  # what handles of these calls name
        use_fp8: bool,
        use_nvfp4: bool,
        num_local_experts: int,
        forms: Sequence[tuple[object, object, object]],  # shape, strides, dtype of recv_x,
        # metadata, recv_count and, if there are, scales
    ) -> None: ...
    dispatch: Callable[..., tuple[object, ...] | None]
    combine: Callable[..., tuple[object, ...] | None]
    is_served: bool  # False: none is, whatever its form
    def layer(
        self,
        *,
        shape: object,  # of a form that was added: bfloat16, weights travel
        decode_tokens: int,  # the most of a step
        rows: tuple[object, object, object],  # shape, strides, dtype of [L * N, hidden]
        batch_type: type,
        common: dict[str, object],  # what all batches hold
        state_type: type[tuple[object, ...]],
        words: object,  # HostWords.place, or None
        rule: object,  # ModeRule
    ) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """``begin(x, topk_idx, topk_weights, is_asking)``, ``end(rows, state)`` and
        ``answer(exchange)`` of a layer's decode step: see deep_comm/layer/quick_decode.py."""

class LowLatencyPlan:
    """A shape and options of low-latency calls of one engine. Arguments of calls are positional.

    T tokens of this rank, M num_max_tokens, N = num_ranks * M, L local experts, S scales of a row.
    """

    num_blocks: int
    num_metadata_bytes: int  # of a dispatch's metadata block, 16-byte aligned
    metadata: dict[str, int]  # offsets in it, of those of the parts below that these calls have:
    # recv_count int32 [L]; num_recv int32 [1]; ticket uint32 [1]; recv_tokens int32 [num_ranks];
    # layout_range int64 [L, num_ranks], compact: [num_ranks]; src_info int32 [L, N], compact: [N];
    # places int32 [num_ranks, M, K], compact: [num_ranks, M]; recv_weights float32 [num_ranks, M,
    # K]; compact_idx int32 [N, K]; compact_weights float32 [N, K]
    def dispatch(
        self,
        x: int,  # bfloat16 [T, hidden]
        topk_idx: int,  # [T, K]
        topk_idx_bytes: int,
        topk_weights: int,  # float32 [T, K], or 0
        num_tokens: int,  # T
        recv_x: int,  # out [L, N, row]; compact: [N, row]
        recv_scales: int,  # out float32 [L, S, N], UE8M0: int32 [L, ceil(S / 4), N]; NVFP4: uint8
        # [L, ceil(N / 128), hidden / 64, 32, 4, 4]; compact: without L; or 0
        metadata: int,  # out
        cumulative_stats: int,  # int32 [L], or 0
        wait_stats: int,  # int64 [num_ranks], or 0
        send: bool,  # phases of this launch
        receive: bool,
        has_ticket: bool,  # the ticket is written by a send phase, or read by a receive phase alone
        is_reporting: bool,  # wait_low_latency_num_tokens will be called
        stream: int,
        global_scale: int,  # float32 [1] of NVFP4; 0: 1
        /,
    ) -> None: ...
    def combine(
        self,
        x: int,  # bfloat16 [L, N, hidden]; compact: [N, hidden]
        metadata: int,  # from dispatch
        topk_idx: int,
        topk_idx_bytes: int,
        topk_weights: int,  # float32 [T, K]; 0: reduced rows, or weights that came with dispatch
        num_tokens: int,
        rows: int,  # 0: sums, 1: reduced (compact), 2: selections (one rounding)
        use_logfmt: bool,  # not with selections
        combined_x: int,  # out bfloat16 [T, hidden]
        wait_stats: int,  # int64 [num_ranks], or 0
        send: bool,
        receive: bool,
        ticket: int,  # uint32 [1], or 0
        stream: int,
        /,
    ) -> None: ...

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

def host_words_bytes(num_ranks: int) -> int: ...
def host_words(
    address: int, rank: int, num_ranks: int, owner: object
) -> tuple[
    Callable[[int], int], Callable[[int], int | None], Callable[[], int], Callable[[int], None]
]:
    """``tell``, ``most``, ``exchange`` and ``set_exchange`` of deep_comm.layer.host_words, over
    zeroed memory that ``owner`` keeps.
    """

class Block:
    """Bytes of the heap, given back when the last reference goes."""

    offset: int
    num_bytes: int
    def expose(self) -> None:
        """Of a scratch block: from now on others than the engine's kernels use it."""
    def shrink(self, num_bytes: int) -> None:
        """Give back what lies behind the first num_bytes; nobody but the
        block's own stream has used it.
        """

class Region:
    """First-fit allocator of 128-byte aligned blocks in [begin, end).

    A block may be given back while kernels that read it are still queued: ``mark(stream)`` then
    makes an event on the current stream and on the one that was current when the block was taken,
    and whoever gets the bytes next waits for both; None: nothing can be in flight. Blocks taken
    while ``is_capturing()`` are only handed out to the same or later captures: replays of the CUDA
    graph write to them whenever they like. Within a capture ``mark_captured(stream)`` makes the
    events: (event, number of the capture), or None if the stream is in none.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        mark: Callable[[int], Any],
        is_capturing: Callable[[], bool],
        current_stream: Callable[[], int],
        mark_captured: Callable[[int], tuple[Any, int] | None],
    ) -> None: ...
    def allocate_scratch(
        self, num_bytes: int, after: int | None = None
    ) -> tuple[Block, list[Any]] | None:
        """A block that only the engine's kernels use, which run one behind
        the other; see ``allocate``.
        """
    def taker(self) -> Callable[[int, int, bool, bool, bool], tuple[Block, list[Any]] | None]:
        """take(num_bytes, stream, is_behind_stream, is_captured, is_scratch): the same for those
        who know the current stream.
        """
    def allocate(self, num_bytes: int, after: int | None = None) -> tuple[Block, list[Any]] | None:
        """A block and the events to wait for before anything writes to it;
        None if there is no room.

        Events of stream ``after`` are left out: the caller's work is behind
        all that is queued there.
        """
    num_free_bytes: int

def matrix(
    address: int,
    num_rows: int,
    num_columns: int,
    type_code: int,  # DLPack's
    type_bits: int,
    device_type: int,  # DLPack's
    device_index: int,
    owner: object,  # lives as long as the last tensor over the memory
) -> object:
    """A DLPack capsule for torch.from_dlpack: contiguous memory that somebody else owns."""

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
        weak_memory: bool = True,  # hold stores that are not releases
        delay_bulk: bool = True,  # complete bulk copies late
        faults: Sequence[str] = (),  # names of Fault: "weaken_release", "skip_credit", ...
        stalls: Sequence[
            tuple[int, int, int]
        ] = (),  # (rank, after step, for so many steps); 0 steps: for ever
        # "report": raise SimulationStuck; "clock": jump to the next deadline
        on_stuck: str = "report",
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
    """Stage, word and peer (-1: none) of a note of ``gave_up``."""
