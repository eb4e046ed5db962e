"""What is tested here is the host target, also on a machine with GPUs, where a Buffer would take
one."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
