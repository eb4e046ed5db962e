"""What the trainers' programs share: text, process groups, and what stands in for CUDA on the host.

A job is the JSON that training.py wrote. Where two ranks share a GPU, and on the host, gloo
exchanges; where there is a GPU, over copies on the host, since it does not take all of CUDA's
tensors, and NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import host_copies  # noqa: E402, F401  registers its process group
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from released.host import cuda_means_host, current_stream  # noqa: E402

SEED = 1


class Text:
    """Bytes of this project's pages. Every rank has batches of its own, the same in every run."""

    def __init__(self, job, rank):
        pages = sorted((ROOT / "docs").rglob("*.md"))
        data = b"".join(path.read_bytes() for path in pages)
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length, self.batch = job["length"], job["batch"]
        self.generator = torch.Generator().manual_seed(SEED + rank)

    def __iter__(self):
        return self

    def __next__(self):
        """Tokens, and the token after each: int64 [batch, length]."""
        starts = torch.randint(
            self.data.numel() - self.length, (self.batch, 1), generator=self.generator
        )
        both = self.data[starts + torch.arange(self.length + 1)].long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


# ---- a machine -----------------------------------------------------------------------------------


def device_of(job):
    if job["device"] == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if job["one_gpu"] else int(os.environ["LOCAL_RANK"]))


def _typed_as_cuda(inner):
    def type_of(self, *arguments, **options):
        said = inner(self, *arguments, **options)
        is_name = isinstance(said, str) and "cuda" not in said
        return said.replace("torch.", "torch.cuda.") if is_name else said

    return type_of


@contextlib.contextmanager
def _host():
    """CUDA's random numbers are the host's, and tensors say that they are CUDA's."""

    def state(device=None):
        return torch.get_rng_state()

    stand_ins = {
        "current_device": lambda: torch.device("cpu"), "default_stream": current_stream,
        "get_rng_state": state, "manual_seed": torch.manual_seed,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_means_host())
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.cuda.random, "get_rng_state", state))
        typed = _typed_as_cuda(torch.Tensor.type)
        stack.enter_context(mock.patch.object(torch.Tensor, "type", typed))
        yield


@contextlib.contextmanager
def machine(job):
    """The process group of all ranks, and a device that computes the same in every run."""
    device = device_of(job)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(SEED)
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            torch.set_num_threads(1)
            stack.enter_context(_host())
        else:
            torch.cuda.init()  # or a mesh of torch would choose the device by rank
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if not job["copies"] else "host_copies")
        yield device
        dist.barrier()
        dist.destroy_process_group()


class Log:
    """Losses and norms of gradients, by step."""

    def __init__(self):
        self.losses, self.norms = [], []

    def add(self, loss, norm):
        self.losses.append(float(loss))
        self.norms.append(float(norm))
        print(f"step {len(self.losses)}: loss {self.losses[-1]} norm {self.norms[-1]}", flush=True)

    def write(self, job, trainer, device):
        name = torch.cuda.get_device_name() if device.type == "cuda" else "host"
        facts = dict(trainer=trainer, torch=torch.__version__, device=name)
        Path(job["result"]).write_text(
            json.dumps(dict(facts=facts, losses=self.losses, norms=self.norms))
        )
