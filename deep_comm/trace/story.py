"""How far the blocks of a call came that did not end well, in a few lines."""

from __future__ import annotations

from deep_comm import _core
from deep_comm.trace.recording import Event, Recording

_GAVE_UP = "gave_up"
_MOST_LINES = 12


def _waited(event: Event) -> str:
    stage, word, peer = _core.trace_wait(event.value)
    whom = f" for rank {peer}" if peer >= 0 else ""
    return f"gave up waiting{whom} in stage {stage} (word '{word}')"


def _end_of(events: list[Event]) -> str:
    """Of one block, by time: what it noted last, and whether a wait ended in vain."""
    gave_up = next((event for event in events if event.step == _GAVE_UP), None)
    # Behind a wait that ended in vain steps are passed without what they mean.
    steps = [event.step for event in events if gave_up is None or event.time_ns < gave_up.time_ns]
    last = f"last step '{steps[-1]}'" if steps else "no step"
    return last if gave_up is None else f"{last}, then {_waited(gave_up)}"


def _ranges(blocks: list[int]) -> str:
    parts: list[list[int]] = []
    for block in sorted(blocks):
        if parts and parts[-1][-1] == block - 1:
            parts[-1] = [parts[-1][0], block]
        else:
            parts.append([block, block])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"block{'s' if len(blocks) > 1 else ''} {text}"


def story(recording: Recording, kernel: str) -> str:
    """Where each block of the last call of ``kernel`` was; blocks at one place together."""
    calls = [call for name, call in recording.calls if name == kernel]
    if not calls:
        return f"trace of rank {recording.rank}: no block of {kernel} has noted a step"
    events = recording.of_call(kernel, calls[-1])
    by_block: dict[int, list[Event]] = {}
    for event in events:
        by_block.setdefault(event.block, []).append(event)
    by_end: dict[str, list[int]] = {}
    for block, noted in by_block.items():
        by_end.setdefault(_end_of(noted), []).append(block)
    lines = sorted((min(blocks), f"  {_ranges(blocks)}: {end}") for end, blocks in by_end.items())
    text = [f"trace of rank {recording.rank}, {kernel} number {calls[-1]}:"]
    text += [line for _, line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        text.append(f"  and {len(lines) - _MOST_LINES} more places")
    return "\n".join(text)
