"""Sizes of a group, by the module path of V2."""

from deep_comm.compat.elastic import get_logical_domain_size, get_physical_domain_size

__all__ = ["get_logical_domain_size", "get_physical_domain_size"]
