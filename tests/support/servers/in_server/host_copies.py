"""A process group for ranks that share a GPU, which NCCL refuses, and for the host: "host_copies".

gloo exchanges copies on the host, since it does not take all of CUDA's tensors.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


def _on_host(given):
    if isinstance(given, (list, tuple)):
        return [_on_host(one) for one in given]
    return given.detach().cpu().clone() if isinstance(given, torch.Tensor) else given


def _copy_back(given, found):
    if isinstance(given, torch.Tensor):
        with torch.no_grad():
            given.copy_(found)
    else:
        for one, other in zip(given, found, strict=True):
            _copy_back(one, other)


def _over_copies(name):
    def call(self, *arguments):
        found = _on_host(arguments)
        getattr(self.gloo, name)(*found).wait()
        _copy_back(arguments[0], found[0])  # every collective writes its first argument
        done = torch.futures.Future()
        done.set_result(arguments[0])
        return _create_work_from_future(done)

    return call


class HostCopies(dist.ProcessGroup):
    """gloo over copies on the host, for tensors of any device."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def barrier(self, opts=None):
        return self.gloo.allreduce([torch.zeros(1)])

    def shutdown(self):
        """Its threads end here: at the interpreter's end one that frees a tensor would abort it."""
        del self.gloo

    def _set_group_name(self, name):
        self.name = name

    @property
    def group_name(self):
        return self.name


_NEWER = {  # what torch 2.13 calls them
    "all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}  # fmt: skip
for _name in (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "allreduce_coalesced",
    "alltoall_base", "broadcast", *_NEWER,
):  # fmt: skip
    setattr(HostCopies, _name, _over_copies(_NEWER.get(_name, _name)))

dist.Backend.register_backend("host_copies", HostCopies, devices=["cpu", "cuda"])
