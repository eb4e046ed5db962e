"""Which mode the next step begins with: a rule over what every rank knows alike.

A rank knows its own tokens, not those of its peers, so that no rule over the tokens of the step at
hand can be right on all ranks without asking first. But every exchange tells every rank the most
tokens that any rank had in it (Handle.max_num_tokens, Buffer.wait_low_latency_num_tokens). So:

* the step begins with the mode that the *last* step's maximum asks for;
* a prefill exchange takes any number of tokens: if it was the wrong guess, it was only slow;
* a decode exchange is also the question: a rank with too many tokens takes part in it with one
  token more than decode_tokens that goes nowhere. Every rank then learns that the maximum is too
  large, and a prefill exchange follows on all of them.

Every branch depends on numbers that all ranks have alike, so that all ranks make the same calls
in the same order whatever tokens they have; see docs/design for the argument and what it costs.
"""

from __future__ import annotations


class ModeRule:
    """State of one layer, the same on every rank. Native code tells it (calls.py)."""

    __slots__ = ("decode_tokens", "begins_with_decode", "num_steps", "num_changes")

    def __init__(self, decode_tokens: int) -> None:
        self.decode_tokens = decode_tokens
        self.begin_anew()

    def begin_anew(self) -> None:
        """As a new one: after a reset, on all ranks."""
        self.begins_with_decode = True
        self.num_steps = 0
        self.num_changes = 0  # steps that took another mode than the one they began with

    def learn(self, max_num_tokens: int) -> bool:
        """After an exchange: may the step be, or have been, a decode step?"""
        fits = max_num_tokens <= self.decode_tokens
        self.num_steps += 1
        self.num_changes += fits != self.begins_with_decode
        self.begins_with_decode = fits
        return fits
