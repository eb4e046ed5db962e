"""The module paths of V2."""

from deep_ep.buffers import elastic, legacy

__all__ = ["elastic", "legacy"]
