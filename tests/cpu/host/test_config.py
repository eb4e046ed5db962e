"""Config: what it accepts, what it hints, and how rings are planned from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deep_comm import ArgumentError, Buffer, BufferTooSmall, Config, _simt_tests
from deep_comm.config import host_default


def test_defaults_are_those_that_callers_know() -> None:
    config = Config()
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (20, 6)
    assert config.num_max_nvl_chunked_recv_tokens == 256
    assert config.num_max_rdma_chunked_send_tokens == 6
    assert config.num_max_rdma_chunked_recv_tokens == 258  # a multiple of the send chunk


def test_keywords_and_positions_mean_the_same() -> None:
    keywords = Config(
        num_sms=8, num_max_nvl_chunked_send_tokens=4, num_max_nvl_chunked_recv_tokens=64,
        num_max_rdma_chunked_send_tokens=8, num_max_rdma_chunked_recv_tokens=32,
    )  # fmt: skip
    assert keywords == Config(8, 4, 64, 8, 32)
    assert keywords.num_channels == 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_sms": -1}, "num_sms"),
        ({"num_sms": 2.5}, "num_sms"),
        ({"num_sms": "24"}, "num_sms"),
        ({"num_sms": np.int32(24)}, "num_sms"),  # addresses reckoned with it would wrap
        ({"num_max_nvl_chunked_send_tokens": 0}, "num_max_nvl_chunked_send_tokens"),
        ({"num_max_nvl_chunked_recv_tokens": 0}, "num_max_nvl_chunked_recv_tokens"),
        ({"num_max_rdma_chunked_send_tokens": 0}, "num_max_rdma_chunked_send_tokens"),
        ({"num_max_nvl_chunked_send_tokens": 257}, "num_max_nvl_chunked_send_tokens"),
        ({"num_max_rdma_chunked_send_tokens": 129}, "num_max_rdma_chunked_send_tokens"),
        (
            {"num_max_rdma_chunked_send_tokens": 3, "num_max_rdma_chunked_recv_tokens": 2**31 - 1},
            "num_max_rdma_chunked_recv_tokens",
        ),
    ],
)
def test_a_bad_value_is_named(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Config(**arguments)
    assert caught.value.argument == named
    assert str(caught.value.value) in str(caught.value)


def test_a_ring_of_one_slot_is_legal() -> None:
    assert Config(2, 1, 1).num_max_nvl_chunked_recv_tokens == 1


def test_ring_bytes_follow_the_formula() -> None:
    # 10 channels, 8 ranks: head, tail and offsets of 5 words, and 256 slots of a row with metadata.
    slot = 14336 + 8 + 128 * 8 + 128 * 4 + 128 * 4
    expected = 10 * 8 * (5 * 4 + 256 * slot)
    assert Config().ring_bytes(14336, 8) == -(-expected // 128) * 128
    assert Config().ring_bytes(14336, 3) % 128 == 0
    assert Config().get_nvl_buffer_size_hint(14336, 8, num_tokens=0) == Config().ring_bytes(
        14336, 8
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_rows"),
    [(2, 2 * 4096), (4, 4 * 4096), (8, math.ceil(1.25 * 8 * 4096 * (1 - (7 / 8) ** 8)))],
)
def test_nvl_hint_has_a_region_for_rows_of_a_dispatch_and_its_combine(
    num_ranks: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniform routing with a quarter on top, at most all tokens of all ranks; 64 MiB of rings."""
    hint = Config().get_nvl_buffer_size_hint
    region = hint(14336, num_ranks) - (64 << 20)
    assert 0 <= region - 2 * num_rows * (14336 + 256) < 128
    assert hint(14336, num_ranks, num_tokens=8192) - (64 << 20) == pytest.approx(2 * region)
    monkeypatch.setenv("DEEP_COMM_REGION_TOKENS", "1024")
    assert hint(14336, num_ranks) == hint(14336, num_ranks, num_tokens=1024)
    monkeypatch.setenv("DEEP_COMM_REGION_TOKENS", "0")
    assert hint(14336, num_ranks) == Config().ring_bytes(14336, num_ranks)


def test_nvl_hint_is_enough_for_a_region_however_few_the_bytes() -> None:
    for num_tokens in (1, 4096):
        assert Config().get_nvl_buffer_size_hint(16, 2, num_tokens=num_tokens) == 128 << 20
    with pytest.raises(ArgumentError):
        Config().get_nvl_buffer_size_hint(16, 2, num_tokens=-1)


def test_rdma_hint_is_zero_inside_a_node_and_follows_the_formula_beyond() -> None:
    config = Config(20, 6, 256, 6, 120)
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    slot = 14336 + 8 + 128 * 8 + 128 * 4 + 128 * 4 + 16
    expected = 2 * 10 * 2 * ((8 * 2 + 2) * 4 + 120 * slot)
    assert config.get_rdma_buffer_size_hint(14336, 16) == -(-expected // 128) * 128
    with pytest.raises(ArgumentError):
        config.get_rdma_buffer_size_hint(14336, 12)


def test_hints_know_the_logical_nodes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that size their buffers as for real nodes need not know of logical ones."""
    config = Config()
    for ranks_per_node in (2, 3):
        monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", str(ranks_per_node))
        for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
            assert hint(14336, 6) == hint(14336, 6, ranks_per_node) > 0
        assert config.get_rdma_buffer_size_hint(14336, ranks_per_node) == 0
    monkeypatch.setenv("DEEP_COMM_RANKS_PER_NODE", "16")  # all ranks of the group
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_node_size_has_recommended_configs(num_ranks: int) -> None:
    for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
        assert config.num_sms == Buffer.num_sms


def test_recommended_configs_of_known_sizes() -> None:
    assert Buffer.get_dispatch_config(8) == Config(20, 6, 256, 6, 128)
    assert Buffer.get_combine_config(144) == Config(20, 2, 720, 8, 128)


def test_other_sizes_take_the_config_of_the_next_smaller_one() -> None:
    assert Buffer.get_dispatch_config(12) == Buffer.get_dispatch_config(8)
    assert Buffer.get_combine_config(320) == Buffer.get_combine_config(160)
    with pytest.raises(ArgumentError) as caught:
        Buffer.get_dispatch_config(0)
    assert caught.value.argument == "num_ranks"


def test_set_num_sms_changes_recommended_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(8).num_sms == 24
    for bad in (0, -2):
        with pytest.raises(ArgumentError):
            Buffer.set_num_sms(bad)


def _plan(
    config: Config | None,
    num_nvl_bytes: int,
    *,
    num_ring_bytes: int | None = None,
    num_channels: int = 0,
    max_sms: int | None = None,
) -> tuple[int, int, int]:
    """(channels, send tokens, slots) of ``config``, or of the host's default; a slot has 100
    bytes."""
    planned = host_default() if config is None else config
    plan: tuple[int, int, int] = _simt_tests.plan_channels(
        planned.num_sms, planned.num_max_nvl_chunked_send_tokens,
        planned.num_max_nvl_chunked_recv_tokens, config is not None, num_channels, num_nvl_bytes,
        num_nvl_bytes if num_ring_bytes is None else num_ring_bytes, max_sms,
    )  # fmt: skip
    return plan


def test_a_default_config_shrinks_until_it_fits() -> None:
    assert _plan(None, 1600) == (1, 4, 16)
    assert _plan(None, 1599) == (1, 4, 8)
    assert _plan(None, 100) == (1, 1, 1)
    with pytest.raises(BufferTooSmall) as caught:
        _plan(None, 99)
    assert caught.value.needed_bytes == 1600
    assert "at least 1600" in str(caught.value) and "from 100 on" in str(caught.value)


def test_a_given_config_is_taken_as_it_is_or_refused() -> None:
    assert _plan(Config(4, 6, 256), 51200) == (4, 6, 128)
    with pytest.raises(BufferTooSmall) as caught:
        _plan(Config(4, 6, 256), 51199)
    assert caught.value.needed_bytes == 51200
    assert caught.value.value == 51199


def test_rings_take_what_the_receive_region_leaves() -> None:
    assert _plan(Config(4, 6, 256), 51200, num_ring_bytes=51199) == (4, 6, 64)
    with pytest.raises(BufferTooSmall) as caught:
        _plan(None, 1600, num_ring_bytes=99)
    assert caught.value.needed_bytes == 1600 + 1600 - 99


def test_the_handle_decides_the_channels_of_a_default_config_only() -> None:
    assert _plan(None, 10**6, num_channels=3)[0] == 3
    assert _plan(Config(4, 1, 1), 10**6, num_channels=3)[0] == 4


@pytest.mark.parametrize("num_sms", [0, 257])
def test_channels_have_control_words_up_to_a_limit(num_sms: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        _plan(Config(num_sms), 10**9)
    assert caught.value.argument == "config.num_sms"


def test_more_sms_than_the_device_has_are_refused() -> None:
    with pytest.raises(ArgumentError):
        _plan(Config(134), 10**9, max_sms=132)
