"""Which GPUs the CUDA module has kernels for."""

from __future__ import annotations

import re


def runs_on(architectures: str, major: int, minor: int, *, least: int = 0) -> bool:
    """Return True if kernels for those of `architectures` from sm_`least` on run on that compute
    capability.

    Machine code runs on its major version from its minor version on ("80"), on its own alone
    ("90a"), or on its family ("100f": all of 10.x). PTX runs on everything later ("ptx90"), that
    of a family only there.
    """
    for name in architectures.split():
        found = re.fullmatch(r"(ptx)?(\d+)(\d)([af]?)", name)
        if found is None:
            continue
        is_ptx, built, kind = found[1] is not None, (int(found[2]), int(found[3])), found[4]
        if 10 * built[0] + built[1] < least:
            continue
        if (major, minor) < built or (kind == "a" and (major, minor) != built):
            continue
        if major == built[0] or (is_ptx and kind == ""):
            return True
    return False
