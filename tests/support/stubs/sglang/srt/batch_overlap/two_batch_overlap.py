from typing import Any

from sglang.srt.layers.moe.token_dispatcher import BaseDispatcher, DeepEPDispatcher


class MaybeTboDeepEPDispatcher(BaseDispatcher):
    """Two dispatchers, one for each half of a batch."""

    def __init__(self, runner_backend: Any = None, num_inner: int = 2, **options: Any) -> None:
        super().__init__()
        self._inners = [
            DeepEPDispatcher(runner_backend=runner_backend, **options) for _ in range(num_inner)
        ]

    @property
    def expert_mask_gpu(self) -> Any:
        return self._inners[0].expert_mask_gpu

    def _call(self, name: str, tbo_subbatch_index: int = 0, **options: Any) -> Any:
        return getattr(self._inners[tbo_subbatch_index], name)(**options)

    def dispatch(self, **options: Any) -> Any:
        return self._call("dispatch", **options)

    def dispatch_a(self, **options: Any) -> Any:
        return self._call("dispatch_a", **options)

    def dispatch_b(self, **options: Any) -> Any:
        return self._call("dispatch_b", **options)

    def combine(self, **options: Any) -> Any:
        return self._call("combine", **options)

    def combine_a(self, **options: Any) -> Any:
        return self._call("combine_a", **options)

    def combine_b(self, **options: Any) -> Any:
        return self._call("combine_b", **options)

    def set_quant_config(self, quant_config: dict) -> None:
        super().set_quant_config(quant_config)
        for inner in self._inners:
            inner.set_quant_config(quant_config)
