"""ElasticBuffer against plain loops over everybody's routing, on the host target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from drop_in import NUM_EXPERTS

from deep_comm import UnsupportedError, errors, local
from deep_comm.compat.elastic import ElasticBuffer, EPHandle
from deep_comm.topology import first_expert, num_local_experts

import deep_ep  # isort: skip


pytestmark = pytest.mark.usefixtures("on_the_host")


@dataclass(frozen=True)
class ElasticCase:
    tokens: tuple[int, ...]
    topk: int = 4
    experts: int = NUM_EXPERTS
    routing: str = "holes"
    alignment: int = 1
    max_tokens: int = 40
    sync: bool = True
    expand: bool = False
    fp8: bool = False
    weights: bool = True
    hidden: int = 256
    nodes: int = 1
    hybrid: bool = True

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)


def inputs(case: ElasticCase, rank: int):
    generator = torch.Generator().manual_seed(rank + 77)
    num_tokens = case.tokens[rank]
    # Every element says whose row it is.
    x = torch.arange(num_tokens).view(-1, 1) + 100 * rank + torch.zeros(1, case.hidden)
    idx = torch.rand(num_tokens, case.experts, generator=generator).topk(case.topk).indices
    if case.routing == "duplicates":
        idx = torch.randint(0, case.experts, idx.shape, generator=generator)
    if case.routing == "holes":
        idx = torch.where(torch.rand(idx.shape, generator=generator) < 0.4, -1, idx)
    if case.routing == "none":
        idx = torch.full_like(idx, -1)
    if case.routing == "one":
        idx = torch.zeros_like(idx)
        idx[:, 1:] = -1
    weights = torch.randint(1, 9, idx.shape, generator=generator) / 8
    scales = torch.arange(num_tokens).float().view(-1, 1) + 1000 * rank + torch.arange(2) * 0.25
    return x.to(torch.bfloat16), idx, weights, scales


def expected_rows(case: ElasticCase, rank: int):
    """(source rank, token, {selection: local expert}) of every row that ``rank`` receives."""
    first = first_expert(rank, case.experts, case.num_ranks)
    num_local = num_local_experts(rank, case.experts, case.num_ranks)
    rows = []
    for source in range(case.num_ranks):
        idx = inputs(case, source)[1].tolist()
        for token, selections in enumerate(idx):
            here = {k: e - first for k, e in enumerate(selections) if 0 <= e - first < num_local}
            if here:
                rows.append((source, token, here))
    return rows, num_local


def round_up(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def check_handle(case: ElasticCase, rank: int, handle: EPHandle, num_rows: int):
    rows, num_local = expected_rows(case, rank)
    counts = [
        sum(e == local for _, _, here in rows for e in here.values()) for local in range(num_local)
    ]
    padded = [round_up(count, case.alignment) for count in counts]
    starts = [sum(padded[:local]) for local in range(num_local)]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == (padded if case.sync else [])
    num_scaleup = case.num_ranks // case.nodes if case.hybrid else case.num_ranks
    per_rank = [sum(source % num_scaleup <= r for source, _, _ in rows) for r in range(num_scaleup)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
    assert handle.psum_num_recv_tokens_per_scaleup_rank.is_contiguous()
    ends = [
        start + (count if handle.do_expand else room)
        for start, count, room in zip(starts, counts, padded, strict=True)
    ]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    num_recv = len(rows) if case.sync else case.max_tokens * case.num_ranks
    assert handle.num_recv_tokens == num_recv
    assert handle.num_expanded_tokens >= sum(padded)
    if case.sync:
        assert handle.num_expanded_tokens == sum(padded)
    if not handle.do_expand:
        assert num_rows == num_recv
    else:
        assert num_rows == handle.num_expanded_tokens
        assert num_rows % case.alignment == 0
    # The slots: groups by expert, in the order of rows and of selections.
    slots = torch.full((num_recv, case.topk), -1)
    taken = list(starts)
    for row, (_, _, here) in enumerate(rows):
        for k, local_idx in sorted(here.items()):
            slots[row, k] = taken[local_idx]
            taken[local_idx] += 1
    metadata = handle.recv_src_metadata
    assert metadata.shape == (num_recv, case.topk + 2) and metadata.dtype == torch.int32
    assert metadata[:, 2:].tolist() == slots.tolist()
    sources = [(source * case.max_tokens + token, source) for source, token, _ in rows]
    sources += [(-1, -1)] * (num_recv - len(rows))
    assert [tuple(row) for row in metadata[:, :2].tolist()] == sources
    return rows, slots


def check_payload(case, rank, handle, recv, recv_idx, recv_weights):
    """Every row that should be there, by what its elements say."""
    rows, slots = check_handle(case, rank, handle, (recv[0] if case.fp8 else recv).shape[0])
    recv_x, recv_sf = recv if case.fp8 else (recv, None)
    for row, (source, token, here) in enumerate(rows):
        x, _, weights, scales = inputs(case, source)
        wanted = x.to(torch.float8_e4m3fn) if case.fp8 else x
        places = [int(slots[row, k]) for k in sorted(here)] if handle.do_expand else [row]
        for place, k in zip(places, sorted(here), strict=False):
            assert recv_x[place].float().equal(wanted[token].float())
            if recv_sf is not None:
                assert recv_sf[place].equal(scales[token])
            if recv_weights is not None and handle.do_expand:
                assert float(recv_weights[place]) == float(weights[token, k])
        if not handle.do_expand:
            assert recv_idx[row].tolist() == [here.get(k, -1) for k in range(case.topk)]
            if recv_weights is not None:
                for k in range(case.topk):
                    assert float(recv_weights[row, k]) == (
                        float(weights[token, k]) if k in here else 0
                    )
    if handle.do_expand:
        assert recv_idx is None
        assert recv_weights is None or recv_weights.shape == (recv_x.shape[0],)
    return rows, slots


def experts_of(case, rank, handle, rows, slots, num_rows):
    """Output of the experts: powers of two that say which expert it was; NaN where nothing is."""
    first = first_expert(rank, case.experts, case.num_ranks)
    out = torch.full((num_rows, case.hidden), float("nan"), dtype=torch.bfloat16)
    for row, (_, _, here) in enumerate(rows):
        if handle.do_expand:
            for k, local_idx in here.items():
                out[slots[row, k]] = float(first + local_idx + 1)
        else:
            out[row] = float(sum(first + local_idx + 1 for local_idx in here.values()))
    return out


def main(group, case: ElasticCase) -> None:
    rank = group.rank()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=case.max_tokens, hidden=case.hidden, num_topk=case.topk,
        allow_hybrid_mode=case.hybrid,
    )  # fmt: skip
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (
        case.nodes, case.num_ranks // case.nodes
    )  # fmt: skip
    x, idx, weights, scales = inputs(case, rank)
    payload = (x.to(torch.float8_e4m3fn), scales) if case.fp8 else x
    num_local = num_local_experts(rank, case.experts, case.num_ranks)
    stats = torch.full((num_local,), 5, dtype=torch.int32)
    recv, recv_idx, recv_weights, handle, event = buffer.dispatch(
        payload, idx, weights if case.weights else None, stats, case.experts,
        expert_alignment=case.alignment, do_cpu_sync=case.sync, do_expand=case.expand,
    )  # fmt: skip
    assert event.event is None
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (
        case.expand, case.experts, case.alignment,
    )  # fmt: skip
    assert handle.topk_idx is not idx and handle.topk_idx.equal(idx)
    rows, slots = check_payload(case, rank, handle, recv, recv_idx, recv_weights)
    assert (stats - 5).tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist()

    num_rows = (recv[0] if case.fp8 else recv).shape[0]
    out = experts_of(case, rank, handle, rows, slots, num_rows)
    bias = torch.full_like(x, 3.0)
    combined, combined_weights, _ = buffer.combine(out, handle, recv_weights, (bias, bias))
    wanted = torch.where(idx >= 0, idx + 1, 0).sum(dim=1, keepdim=True) + 6.0
    assert combined.float().equal(wanted.expand_as(combined).float())
    if case.weights:
        assert combined_weights.equal(torch.where(idx >= 0, weights, 0.0))
    else:
        assert combined_weights is None

    # Cached, the other way round, other weights: as backward passes call it.
    for expand in (not case.expand, case.expand):
        other = weights.flip(0) + 1
        recv, recv_idx, recv_weights, again, event = buffer.dispatch(
            x, topk_weights=other, handle=handle, do_expand=expand
        )
        same = dataclasses.replace(case, fp8=False, weights=False, expand=expand)
        assert again is (handle if expand == case.expand else again)
        kept, recv_weights = recv_weights, None
        rows, slots = check_payload(same, rank, again, recv, recv_idx, recv_weights)
        out = experts_of(same, rank, again, rows, slots, recv.shape[0])
        combined, combined_weights, _ = buffer.combine(out, again, topk_weights=kept)
        assert combined.float().equal((wanted - 6.0).expand_as(combined).float())
        assert combined_weights.equal(torch.where(idx >= 0, other, 0.0))
    group.barrier()
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ElasticCase((7, 0, 12), alignment=1),
        ElasticCase((7, 0, 12), alignment=128, fp8=True),
        ElasticCase((5, 9), routing="duplicates", alignment=16, topk=7),
        ElasticCase((3, 4, 1, 40), routing="one", alignment=8, weights=False),
        ElasticCase((6, 2), routing="none", alignment=4),
        ElasticCase((8,), experts=3, topk=3, alignment=3),
        ElasticCase((9, 3, 5), experts=13, topk=6, alignment=5, fp8=True, weights=False),
    ],
    ids=str,
)
def test_rows_fields_and_sums(case: ElasticCase, sync: bool, expand: bool) -> None:
    case = dataclasses.replace(case, sync=sync, expand=expand)
    local.run(lambda group: main(group, case), case.num_ranks, timeout_s=60)


def alone(fn):
    def body(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
        x = torch.arange(4.0).view(-1, 1).expand(4, 64).to(torch.bfloat16).contiguous()
        return fn(buffer, x, torch.tensor([[0, 1], [1, 2], [2, -1], [3, 0]]))

    return local.run(body, 1, timeout_s=60)[0]


def test_padding_is_zero_on_request_and_only_then_written() -> None:
    def fn(buffer, x, idx):
        recv, _, _, handle, _ = buffer.dispatch(
            x + 1, idx, num_experts=4, expert_alignment=8, do_expand=True, do_zero_padding=True
        )
        real = torch.zeros(recv.shape[0], dtype=torch.bool)
        real[handle.slots[handle.slots >= 0].long()] = True
        assert bool((recv[real] != 0).all()) and bool((recv[~real] == 0).all())
        assert int((~real).sum()) > 0

    alone(fn)


def test_scales_in_columns_for_bulk_copies() -> None:
    def fn(buffer, x, idx):
        sf = torch.arange(12, dtype=torch.int32).view(3, 4).t()
        for expand in (False, True):
            (_, recv_sf), *_ = buffer.dispatch(
                (x, sf), idx, num_experts=4, do_expand=expand, use_tma_aligned_col_major_sf=True
            )
            assert recv_sf.stride() == (1, -(-recv_sf.shape[0] // 4) * 4)
            assert recv_sf.dtype == torch.int32
        assert recv_sf[:2].tolist() == [sf[0].tolist(), sf[3].tolist()]

    alone(fn)


def test_combine_honours_rewritten_metadata() -> None:
    def fn(buffer, x, idx):
        recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:, 3] = torch.tensor([2, 0, 1, 1000], dtype=torch.int32)
        rows = torch.tensor([10.0, 20.0, 30.0]).view(-1, 1).expand(3, 64).to(torch.bfloat16)
        combined, _, _ = buffer.combine(rows.contiguous(), handle)
        assert combined[:, 0].tolist() == [30.0, 10.0, 20.0, 0.0]

    alone(fn)


@pytest.mark.parametrize("sync", [False, True])
def test_combine_honours_rewritten_metadata_between_nodes(
    sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "1")

    def main(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
        x = torch.ones(4, 64, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 1], [1, 2], [2, -1], [3, 0]])
        _, _, _, handle, _ = buffer.dispatch(
            x, idx, num_experts=4, do_expand=True, do_cpu_sync=sync
        )
        # Both ranks have received three tokens of each.
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:6, 3] = torch.arange(6, dtype=torch.int32).flip(0)
        handle.recv_src_metadata[0, 2] = 1000
        rows = (torch.arange(6) + 1).mul(10).view(-1, 1).expand(6, 64).to(torch.bfloat16)
        combined, _, _ = buffer.combine(rows.contiguous(), handle)
        wanted = [[60.0, 110.0, 50.0, 80.0], [30.0, 50.0, 20.0, 20.0]][group.rank()]
        assert combined[:, 0].tolist() == wanted
        group.barrier()
        buffer.destroy()

    local.run(main, 2, timeout_s=60)


def test_rules_of_events() -> None:
    def fn(buffer, x, idx):
        event = ElasticBuffer.capture()
        with pytest.raises(errors.ArgumentError, match="previous_event"):
            buffer.dispatch(x, idx, num_experts=4, previous_event=event)
        for is_async in (False, True):
            recv, _, _, handle, done = buffer.dispatch(
                x, idx, num_experts=4, previous_event=event, allocate_on_comm_stream=True,
                async_with_compute_stream=is_async, previous_event_before_epilogue=event,
            )  # fmt: skip
            assert isinstance(done, deep_ep.EventOverlap)
            with done:
                pass
            buffer.combine(
                recv, handle, previous_event=event, allocate_on_comm_stream=True,
                async_with_compute_stream=is_async, previous_event_before_epilogue=event,
            )  # fmt: skip
            # Unlike V1: without an event it may stand alone.
            buffer.combine(recv, handle, allocate_on_comm_stream=True)

    alone(fn)


def test_cached_dispatch_says_what_does_not_fit_its_handle() -> None:
    def fn(buffer, x, idx):
        recv, recv_idx, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, expert_alignment=2)
        # Neither num_sms nor num_experts is needed beside a handle.
        assert handle.num_sms == buffer.get_theoretical_num_sms(4, 2)
        again, again_idx, _, same, _ = buffer.dispatch(x, handle=handle)
        assert again.equal(recv) and again_idx is recv_idx and same is handle
        buffer.dispatch(
            x, handle=handle, num_experts=4, expert_alignment=2, num_max_tokens_per_rank=8,
            num_sms=handle.num_sms, do_cpu_sync=False,
        )  # fmt: skip
        for options, name in (
            ({"topk_idx": idx}, "topk_idx"),
            ({"num_experts": 5}, "num_experts"),
            ({"expert_alignment": 4}, "expert_alignment"),
            ({"num_max_tokens_per_rank": 16}, "num_max_tokens_per_rank"),
            ({"do_cpu_sync": True}, "do_cpu_sync"),
            ({"topk_weights": torch.ones(4, 3)}, "topk_weights"),
            ({"topk_weights": torch.ones(4, 2, dtype=torch.float64)}, "topk_weights"),
            ({"cumulative_local_expert_recv_stats": torch.zeros(4)}, "cumulative"),
        ):
            with pytest.raises(ValueError, match=name):
                buffer.dispatch(x, handle=handle, **options)

    alone(fn)


def test_arguments_are_checked_before_anything_is_sent() -> None:
    def fn(buffer, x, idx):
        for options, name in (
            ({}, "num_experts"),
            ({"num_experts": 4, "topk_idx": None}, "topk_idx"),
            ({"num_experts": 4, "num_max_tokens_per_rank": 3}, "x"),
            ({"num_experts": 4, "num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank"),
            ({"num_experts": 4, "expert_alignment": 0}, "expert_alignment"),
            ({"num_experts": 4, "num_sms": -2}, "num_sms"),
            ({"num_experts": 4, "handle": (1, 2)}, "handle"),
        ):
            with pytest.raises(ValueError, match=name):
                buffer.dispatch(x, **{"topk_idx": idx, **options})
        recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
        with pytest.raises(ValueError, match="topk_weights"):
            buffer.combine(recv, handle, topk_weights=torch.ones(3))
        with pytest.raises(ValueError, match="x"):
            buffer.combine(recv[0], handle)
        with pytest.raises(ValueError, match="handle"):
            buffer.combine(recv, handle._native)

    alone(fn)


@pytest.mark.parametrize(
    "name",
    [
        "engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv",
        "create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config",
        "agrs_get_inplace_tensor", "all_gather", "get_engram_storage_size_hint",
        "get_pp_buffer_size_hint", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
    ],
)  # fmt: skip
def test_what_cannot_be_offered_says_so(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        getattr(ElasticBuffer, name)(None, 1)


def test_memory_on_the_host_cannot_be_offered() -> None:
    def fn(group):
        with pytest.raises(UnsupportedError, match="num_cpu_bytes"):
            ElasticBuffer(group, num_bytes=2 << 20, num_cpu_bytes=2 << 20)
        with pytest.raises(ValueError, match="hidden"):
            ElasticBuffer(group, num_max_tokens_per_rank=4)

    local.run(fn, 1, timeout_s=60)


def test_sizes_domains_and_resources() -> None:
    def fn(group):
        size = ElasticBuffer.get_buffer_size_hint(group, 64, 256, num_topk=4)
        assert size % (2 << 20) == 0 and size > group.size() * 64 * 512
        assert ElasticBuffer.get_buffer_size_hint(group, 1 << 16, 256, 4, True) < (
            ElasticBuffer.get_buffer_size_hint(group, 1 << 16, 256, 4)
        )
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=256, num_topk=4)
        assert buffer.num_bytes == size
        assert buffer.get_physical_domain_size() == (1, 2) == buffer.get_logical_domain_size()
        assert deep_ep.get_physical_domain_size(group) == (1, 2)
        assert deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, group.rank())
        num_sms = buffer.get_theoretical_num_sms(256, 8)
        assert num_sms >= 1
        assert buffer.get_theoretical_num_qps(num_sms) > 0
        buffer.barrier()
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None

    local.run(fn, 2, timeout_s=60)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ElasticCase((7, 0, 12, 3), nodes=2, alignment=1),
        ElasticCase((7, 0, 12, 3), nodes=2, alignment=128, fp8=True, hybrid=False),
        ElasticCase((5, 9), nodes=2, routing="duplicates", alignment=16, topk=7),
        ElasticCase((6, 2, 0, 1, 40, 8), nodes=3, experts=13, topk=6, alignment=5, weights=False),
        ElasticCase((3, 4), nodes=2, routing="none", alignment=4),
    ],
    ids=str,
)
def test_rows_fields_and_sums_over_several_nodes(
    case: ElasticCase, sync: bool, expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(case.num_ranks // case.nodes))
    case = dataclasses.replace(case, sync=sync, expand=expand)
    local.run(lambda group: main(group, case), case.num_ranks, timeout_s=60)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_domains_of_several_nodes(is_hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "2")
    logical = (2, 2) if is_hybrid else (1, 4)

    def fn(group):
        assert deep_ep.get_physical_domain_size(group) == (2, 2)
        assert deep_ep.get_logical_domain_size(group, is_hybrid) == logical
        buffer = ElasticBuffer(
            group, num_bytes=16 << 20, num_max_tokens_per_rank=8, allow_hybrid_mode=is_hybrid,
            num_allocated_qps=6,
        )  # fmt: skip
        rank = group.rank()
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == logical
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, logical[1])
        assert buffer.get_physical_domain_size() == (2, 2)
        assert buffer.get_logical_domain_size() == logical
        assert buffer.get_theoretical_num_qps(4) == 6
        assert (
            buffer.runtime.get_num_rdma_ranks() == 2 and buffer.runtime.get_rdma_rank() == rank // 2
        )
        engine = buffer._buffer
        assert engine.num_nvl_bytes + engine.num_rdma_bytes == buffer.num_bytes == 16 << 20
        assert min(engine.num_nvl_bytes, engine.num_rdma_bytes) > 1 << 20
        x = torch.full((3, 64), rank + 1.0, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 5], [7, 2], [-1, 4]])
        recv, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=8, num_sms=4)
        # What a backward pass hands back: two SMs make a channel between nodes.
        assert handle.num_sms == 2 * handle._native.num_channels
        again, *_ = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
        assert again.equal(recv)
        copies = torch.tensor([2.0, 2.0, 1.0]).view(-1, 1)
        assert buffer.combine(recv, handle)[0].float().equal(x.float() * copies)
        # Expanded, padded with zeros, behind events, beside the compute stream.
        event = ElasticBuffer.capture()
        recv, _, _, handle, done = buffer.dispatch(
            x, idx, num_experts=8, expert_alignment=16, do_expand=True, do_zero_padding=True,
            previous_event=event, allocate_on_comm_stream=True, async_with_compute_stream=True,
            previous_event_before_epilogue=event,
        )  # fmt: skip
        with done:
            pass
        ends, counts = (
            handle.psum_num_recv_tokens_per_expert,
            handle.num_recv_tokens_per_expert_list,
        )
        real = handle.num_unaligned_recv_tokens_per_expert
        assert all(count % 16 == 0 for count in counts) and recv.shape[0] == sum(counts)
        is_real = torch.zeros(recv.shape[0], dtype=torch.bool)
        for end, count in zip(ends.tolist(), real.tolist(), strict=True):
            is_real[end - count : end] = True
        assert bool((recv[is_real] > 0).all()) and bool((recv[~is_real] == 0).all())
        combined, _, _ = buffer.combine(recv, handle, allocate_on_comm_stream=True)
        assert combined.float().equal(x.float() * copies)
        group.barrier()
        buffer.destroy()

    local.run(fn, 4, timeout_s=60)
