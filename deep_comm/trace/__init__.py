"""What every block of every kernel did when, in the last calls of a Buffer.

Off, it costs nothing. On (``Buffer(trace=16)`` or ``DEEP_COMM_TRACE=16``), blocks note the time of
a handful of steps in rings in device memory, and ``Buffer.trace()`` reads them. With
``DEEP_COMM_TRACE_DIR`` every rank leaves a file when its Buffer is destroyed, and
``deep_comm trace FILES -o out.json`` makes one Chrome trace and a summary of them. A
PeerTimeout tells how far the blocks of its call had come.
"""

from deep_comm.trace.alignment import Alignment, align
from deep_comm.trace.chrome import chrome_trace
from deep_comm.trace.recording import Event, Recording, load
from deep_comm.trace.story import story
from deep_comm.trace.summary import summarise

__all__ = [
    "Alignment",
    "Event",
    "Recording",
    "align",
    "chrome_trace",
    "load",
    "story",
    "summarise",
]
