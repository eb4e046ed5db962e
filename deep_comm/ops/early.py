"""Dispatches that are launched before their counts are known: how many rows to have room for, and
between nodes when.
"""

from __future__ import annotations

from deep_comm import _core


class EarlyLaunches:
    """Whether a dispatch goes out before its counts are known. All ranks must do alike: they see
    the same outcomes, of the same calls. After failures in a row it is tried less and less often.
    """

    __slots__ = ("_num_failures", "_num_to_skip")
    _MOST_SKIPPED = 63

    def __init__(self) -> None:
        self._num_failures = self._num_to_skip = 0

    @property
    def is_due(self) -> bool:
        """What is_next is about to say."""
        return self._num_to_skip == 0

    def is_next(self) -> bool:
        if self.is_due:
            return True
        self._num_to_skip -= 1
        return False

    def learn(self, has_sent: bool) -> None:
        self._num_failures = 0 if has_sent else self._num_failures + 1
        # The first one may well have been a guess by a rank that knew of no tokens.
        self._num_to_skip = min(max(self._num_failures - 1, 0), self._MOST_SKIPPED)


class ExpectedRows:
    """How many rows a dispatch may bring, by what earlier ones of the Buffer brought. Holds
    nothing else: native code holds it.

    Attributes:
        most_tokens: that any rank has brought to a dispatch.
        agreed_tokens: that a rank will ever bring, as a layer's ranks have agreed; or 0.
    """

    __slots__ = (
        "_choices", "_most_expanded_rows", "_most_rows", "_num_nodes", "_num_ranks",
        "agreed_tokens", "most_tokens",
    )  # fmt: skip
    _MOST_REMEMBERED = 256

    def __init__(self, num_ranks: int, num_nodes: int = 1) -> None:
        self._num_ranks, self._num_nodes = num_ranks, num_nodes
        self.agreed_tokens = 0
        self._most_rows = 0  # of one dispatch
        self._most_expanded_rows = 0
        self.most_tokens = 0
        self._choices: dict[int, tuple[int, ...]] = {}

    def learn(self, num_rows: int, max_num_tokens: int) -> None:
        """What has come to this rank, and the most tokens of any."""
        if num_rows > self._most_rows or max_num_tokens > self.most_tokens:
            self._most_rows = max(self._most_rows, num_rows)
            self.most_tokens = max(self.most_tokens, max_num_tokens)
            self._choices.clear()

    def learn_expanded(self, num_rows: int, max_num_tokens: int) -> None:
        self._most_expanded_rows = max(self._most_expanded_rows, num_rows)
        self.learn(0, max_num_tokens)

    def choices(self, num_tokens: int) -> tuple[int, ...]:
        """Numbers of rows to have room for, best first, none of them 0, with ``num_tokens`` of this
        rank: what ranks as full as any has been could send, and some more; or else a little more
        than ever came; or what ranks as full as this one could send.
        """
        known = self._choices.get(num_tokens)
        if known is not None:
            return known
        likely = self._most_rows + self._most_rows // 8
        most = self._num_ranks * max(num_tokens, self.most_tokens)
        choices = {
            max(most + most // 4, likely), max(most, likely), likely, self._num_ranks * num_tokens
        }  # fmt: skip
        if len(self._choices) >= self._MOST_REMEMBERED:
            self._choices.clear()
        known = tuple(sorted(choices - {0}, reverse=True))
        self._choices[num_tokens] = known
        return known

    def forwarded(self, num_tokens: int) -> int:
        """Between nodes: how many rows can come to be handed on, when all ranks have as many
        tokens as this one, as any rank has ever had, or as they have agreed on."""
        return self._num_nodes * max(num_tokens, self.agreed_tokens, self.most_tokens)

    def expanded_choices(
        self, num_tokens: int, places: int, num_experts: int, expert_alignment: int
    ) -> tuple[int, ...]:
        """The same for expanded dispatches with ``places`` of a token: see
        csrc/host/likely_rows.hpp."""
        choices = _core.expanded_choices(
            self._num_ranks, self._most_expanded_rows, num_tokens, places, num_experts,
            expert_alignment,
        )  # fmt: skip
        return tuple(sorted({*choices} - {0}, reverse=True))
