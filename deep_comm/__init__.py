"""deep_comm: dispatch and combine for Mixture-of-Experts layers, on GPUs and on any host.

``Buffer`` is where to start, ``ExpertParallel`` the layer over it that suits every batch size.
``deep_comm.local`` runs ranks as threads of one process, ``deep_comm.simulate`` under a seeded
scheduler, ``deep_comm.reference`` says what results must be.

``import deep_comm`` alone loads neither torch nor the native module: the first use of a name does.
So ``deep_comm doctor`` and every ``--help`` work without them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from deep_comm._version import __version__ as __version__

if TYPE_CHECKING:
    from deep_comm import errors as errors
    from deep_comm._public import *  # noqa: F403

NO_TORCH = "deep_comm needs torch: pip install torch (https://pytorch.org/get-started for GPUs)"
NOT_BUILT = (
    "deep_comm is not built: it has no native module beside {folder}. In a checkout, run "
    "`pip install -e .`; to use an installed deep_comm, start Python in another folder"
)


def explained(error: ImportError) -> ImportError:
    """The error, or one that says what to install where torch or the native module is missing."""
    if error.name == "torch":
        return ImportError(NO_TORCH, name="torch")
    if error.name == f"{__name__}._core":
        return ImportError(NOT_BUILT.format(folder=os.path.dirname(__file__)), name=error.name)
    return error


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise explained(error) from None


def __getattr__(name: str) -> Any:
    """A module of the package, or a name of ``_public``, on its first use."""
    module = f"{__name__}.{name}"
    try:
        return _load(module)
    except ImportError as error:
        if error.name != module or name == "_core":  # a module that needs what is missing
            raise
    if not name.startswith("_") or name == "__all__":
        public = _load(f"{__name__}._public")
        found = {each: getattr(public, each) for each in public.__all__}
        globals().update(found, __all__=[*public.__all__, "__version__", "errors"])
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_load(f"{__name__}._public").__all__})
