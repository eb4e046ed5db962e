"""vllm.v1.worker.workspace: memory of the experts, whose size is fixed when graphs are captured."""

import torch


class WorkspaceManager:
    def __init__(self):
        self._current_workspaces = [None]
        self._locked = False

    def lock(self):
        self._locked = True

    def get(self, num_bytes):
        (current,) = self._current_workspaces
        if current is None or len(current) < num_bytes:
            assert not self._locked, "Workspace is locked"
            self._current_workspaces[0] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._current_workspaces[0]
