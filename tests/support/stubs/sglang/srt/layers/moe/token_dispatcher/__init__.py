from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher  # noqa: F401
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher  # noqa: F401
