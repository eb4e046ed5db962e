"""The receive region: the part of a rank's heap that outputs of dispatch live
in, where peers write them.

The allocator is native, since every call takes a block and gives one back: see ``_core.Region``.
"""

from __future__ import annotations

from deep_comm._core import Block, Region

__all__ = ["Block", "Region"]
