"""What a report says about the machine it was made on."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

import torch

import deep_comm


def describe(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "deep_comm": deep_comm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": device,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["num_gpus"] = torch.cuda.device_count()
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["nccl_nvls_enable"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    return facts


def heading(device: str, command: str, num_ranks: int) -> dict[str, Any]:
    """What every JSON document of a bench begins with: where, how, when, with how many ranks."""
    return {
        "machine": describe(device),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "num_ranks": num_ranks,
    }
