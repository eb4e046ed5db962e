from deep_comm import EventHandle, EventOverlap
from deep_comm.compat.elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
