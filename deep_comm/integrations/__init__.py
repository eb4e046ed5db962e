"""Adapters that put a deep_comm Buffer under a server's own interfaces, without the name deep_ep.

Each imports without its server; then only its classes can be looked at.
"""
