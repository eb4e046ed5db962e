from typing import Any


def create_moe_dispatcher(**options: Any) -> Any:
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher

    return MaybeTboDeepEPDispatcher(**options)
