from deep_comm import Config, EventHandle, EventOverlap
from deep_comm.compat.legacy import Buffer

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
