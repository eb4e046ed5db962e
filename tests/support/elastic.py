"""What ElasticBuffer must return, by plain loops over everybody's routing: bodies of one rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from drop_in import NUM_EXPERTS

from deep_comm import local
from deep_comm.compat.elastic import ElasticBuffer, EPHandle
from deep_comm.ranks.topology import first_expert, num_local_experts


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
    assert handle.dst_buffer_slot_idx.tolist() == places_sent_to(case, rank)
    assert handle.dst_buffer_slot_idx.dtype == torch.int32
    return rows, slots


def places_sent_to(case: ElasticCase, rank: int) -> list[list[int]]:
    """Where every rank puts this rank's tokens, at the last selection there."""
    firsts = [first_expert(r, case.experts, case.num_ranks) for r in range(case.num_ranks)]
    sent, places = [0] * case.num_ranks, []
    for selections in inputs(case, rank)[1].tolist():
        owners = [sum(first <= e for first in firsts) - 1 for e in selections]
        row = [-1] * len(owners)
        for owner in set(owners) - {-1}:
            last = max(k for k, other in enumerate(owners) if other == owner)
            row[last] = rank * case.max_tokens + sent[owner]
            sent[owner] += 1
        places.append(row)
    return places


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


def alone(fn):
    def body(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
        x = torch.arange(4.0).view(-1, 1).expand(4, 64).to(torch.bfloat16).contiguous()
        return fn(buffer, x, torch.tensor([[0, 1], [1, 2], [2, -1], [3, 0]]))

    return local.run(body, 1, timeout_s=60)[0]
