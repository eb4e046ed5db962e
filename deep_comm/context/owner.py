"""What a Buffer and a SymmetricMemory have in common: they own a Context, and how they end."""

from __future__ import annotations

import atexit
import weakref
from typing import TypeVar

from deep_comm.context import Context

Self = TypeVar("Self", bound="ContextOwner")

_living: weakref.WeakSet[ContextOwner] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    for owner in list(_living):
        owner._release_group()


class ContextOwner:
    _context: Context

    def _own(self, context: Context) -> None:
        self._context = context
        self._finalizer = weakref.finalize(self, context.close)
        # At exit the process gives back everything at once, and the CUDA driver may be gone.
        self._finalizer.atexit = False
        _living.add(self)

    def destroy(self) -> None:
        """Free this rank's resources. Idempotent.

        Waits for this rank's own kernels, and until the software NIC has done what they asked for,
        but never for a peer. The last reference does the same when it goes.

        Raises:
            BufferInUse: another thread is in a call, or a signal handler calls this while one
                waits.

        Examples:
            >>> other = deep_comm.Buffer(group, 1 << 20, device="cpu")
            >>> other.destroy()
        """
        self._context.native_calls.close(may_be_in_use=False)
        self._finalizer()
        self._release_group()

    def _release_group(self) -> None:
        """So that destroy_process_group, or the end of the program, really ends the group.

        Threads of a gloo group take the GIL to free tensors of their last collective; if that
        happens while the interpreter is torn down, CPython ends the thread inside a C++ destructor,
        and the process aborts. A group that nobody holds is ended before.
        """
        self._context.rendezvous.release()

    def check(self) -> None:
        """Raise what a kernel of this rank recorded, if any has failed. Does not wait.

        On CUDA devices failures of asynchronous kernels are raised here, or by the next call.

        Raises:
            PeerTimeout, ConfigMismatch, ExpertIndexError, CapacityError, MaskedOut: as recorded.
            BufferInUse: another thread is in a call.

        Examples:
            >>> buffer.check()
        """
        self._context.check()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.destroy()
