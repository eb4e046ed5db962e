"""When a dispatch between nodes is launched before its counts are known."""

from __future__ import annotations


class EarlyLaunches:
    """Whether a dispatch goes out before its counts are known. All ranks must do alike: they see
    the same outcomes, of the same calls. After failures in a row it is tried less and less often.
    """

    __slots__ = ("_num_failures", "_num_to_skip")
    _MOST_SKIPPED = 63

    def __init__(self) -> None:
        self._num_failures = self._num_to_skip = 0

    def is_next(self) -> bool:
        if self._num_to_skip == 0:
            return True
        self._num_to_skip -= 1
        return False

    def learn(self, has_sent: bool) -> None:
        self._num_failures = 0 if has_sent else self._num_failures + 1
        # The first one may well have been a guess by a rank that knew of no tokens.
        self._num_to_skip = min(max(self._num_failures - 1, 0), self._MOST_SKIPPED)
