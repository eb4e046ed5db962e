"""The demo: its layer does not depend on the split, its verdict is right, its program runs."""

from pathlib import Path

import pytest
import torch
import warm

from deep_comm import reference
from deep_comm.bench.payload import same_bits
from deep_comm.demo import layer, report

TEXT = b"A token goes to the ranks that hold its experts, and its sum comes back.\n" * 4


def test_routing_and_payload_of_a_token_do_not_depend_on_its_neighbours() -> None:
    whole = layer.tokens_of(TEXT)
    # The same positions with other tokens around: prefixes of the text.
    for length in (1, 7, 100):
        part = layer.tokens_of(TEXT[:length])
        assert same_bits(part.x, whole.x[:length])
        assert torch.equal(part.topk_idx, whole.topk_idx[:length])
        assert same_bits(part.topk_weights, whole.topk_weights[:length])


def test_equal_bytes_take_different_routes() -> None:
    routes = layer.tokens_of(b"a" * 40).topk_idx
    assert len({tuple(route) for route in routes.tolist()}) > 20


def test_shares_are_uneven_and_complete() -> None:
    for num_ranks in range(1, 9):
        for num_tokens in (1, 5, 1024):
            sizes = layer.split(num_tokens, num_ranks)
            assert sum(sizes) == num_tokens and min(sizes) >= 0
    assert len(set(layer.split(1024, 4))) > 1


def test_layer_is_the_sum_of_its_experts() -> None:
    tokens = layer.tokens_of(TEXT[:50])
    experts = layer.Experts(torch.device("cpu"))
    (result,) = reference.moe_layer(
        [tokens.x], [tokens.topk_idx], [tokens.topk_weights], layer.NUM_EXPERTS, experts
    )
    expected = torch.zeros(50, layer.HIDDEN)
    for token in range(50):
        for idx, weight in zip(tokens.topk_idx[token], tokens.topk_weights[token], strict=True):
            expected[token] += weight * experts(int(idx), tokens.x[token : token + 1])[0].float()
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_program_prints_a_table_and_a_verdict(tmp_path: Path, num_ranks: int) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT)
    command = [*warm.torchrun(num_ranks), "-m", "deep_comm.demo", str(file)]
    done = warm.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: OK" in done.stdout
    table = [
        line for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert [line.split()[0] for line in table] == [str(rank) for rank in range(num_ranks)]
    assert sum(int(line.split()[1]) for line in table) == len(TEXT)


def test_report_sees_a_single_wrong_bit() -> None:
    from deep_comm.demo.forward import STAGES, Forward

    tokens = layer.tokens_of(TEXT[:9])
    experts = layer.Experts(torch.device("cpu"))
    shares = [tokens]
    weights = [tokens.topk_weights]
    (received,) = reference.dispatch([tokens.x], [tokens.topk_idx], layer.NUM_EXPERTS, weights)
    (output,) = reference.moe_layer(
        [tokens.x], [tokens.topk_idx], weights, layer.NUM_EXPERTS, experts
    )

    def forward(recv_x: torch.Tensor, combined_x: torch.Tensor) -> Forward:
        return Forward(
            rank=0, num_tokens=9, num_sent_tokens=0, num_recv_tokens=0, num_rows=9,
            tokens_per_expert=received.num_recv_tokens_per_expert, sent_bytes=0,
            times_s=dict.fromkeys(STAGES, 0.0), recv_x=recv_x, combined_x=combined_x,
        )  # fmt: skip

    assert report.check([forward(received.recv_x, output)], shares, experts) == []
    wrong = output.clone()
    wrong.view(torch.int16)[4, 17] ^= 1
    assert len(report.check([forward(received.recv_x, wrong)], shares, experts)) == 1
    wrong = received.recv_x.clone()
    wrong.view(torch.int16)[0, 0] ^= 1
    assert len(report.check([forward(wrong, output)], shares, experts)) == 1
