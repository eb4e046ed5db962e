from torch import Tensor

from vllm.model_executor.layers.fused_moe.modular_kernel import TopKWeightAndReduce


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        raise RuntimeError("prepare/finalize must choose")


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """[rows, K, H], row by row."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        assert output is None
        num_rows, num_topk = topk_ids.shape
        rows = fused_expert_output.view(num_rows, num_topk, -1).float()
        if not apply_router_weight_on_input:
            rows = rows * topk_weights.unsqueeze(-1)
        return rows.sum(dim=1).to(fused_expert_output.dtype)
