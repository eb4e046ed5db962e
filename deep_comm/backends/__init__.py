"""The targets a Buffer can run on: the host and CUDA devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_comm.backends.base import Backend, Heap
from deep_comm.errors import ArgumentError, UnsupportedError
from deep_comm.settings import env

__all__ = ["Availability", "Backend", "Heap", "create_backend", "is_available", "resolve_device"]


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device asked for, else that of the environment, else CUDA if available, else the host."""
    where = "device"
    if device is None:
        device, where = env.DEVICE.get(), env.DEVICE.name
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if type(device) is int:  # which torch takes for an accelerator that may not be there
        device = f"cuda:{device}"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(where, repr(device), "must be a torch device") from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ArgumentError(where, device, "must be a CPU or CUDA device")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device {device!r} was asked for, but torch sees no CUDA device")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ArgumentError(where, device, f"must be one of {torch.cuda.device_count()} devices")
    return torch.device("cuda", index)


def create_backend(device: torch.device) -> Backend:
    """The backend of a device. Native modules are loaded here, where they are first needed."""
    name, remedy = "_core", "install the package: pip install ."
    if device.type == "cuda":
        name, remedy = "_cuda", "install the package where nvcc is on PATH: pip install ."
    try:
        if device.type == "cuda":
            from deep_comm.backends.cuda import CudaBackend

            return CudaBackend(device)
        from deep_comm.backends.cpu import CpuBackend

        return CpuBackend()
    except ImportError as error:
        raise UnsupportedError(
            f"the native module deep_comm.{name} cannot be loaded ({error}); {remedy}"
        ) from error


@dataclass(frozen=True)
class Availability:
    """True or false, and why.

    Attributes:
        device: what was asked for.
        reason: why Buffers cannot be built there; empty if they can.
    """

    device: str
    reason: str

    def __bool__(self) -> bool:
        return not self.reason


def is_available(device: torch.device | str | int | None = None) -> Availability:
    """Return whether this process can build Buffers on a device, and why not. Local.

    Args:
        device: as of Buffer. "cpu" is the host target.

    Examples:
        >>> usable = deep_comm.is_available("cuda")
        >>> print(usable.reason or "ready")  # doctest: +SKIP
    """
    try:
        create_backend(resolve_device(device))
    except (ArgumentError, UnsupportedError) as error:
        return Availability(str(device), str(error))
    return Availability(str(device), "")
