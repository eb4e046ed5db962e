"""All ranks take the first GPU: read by every Python process whose path has this folder."""

from __future__ import annotations

import torch
from rival import over_host  # noqa: F401  puts gloo in NCCL's place

_set_device = torch.cuda.set_device
torch.cuda.set_device = lambda device: _set_device(0)
