"""The module path of the hybrid-ep branch: there to say that deep_comm does not offer it."""

raise ImportError(
    "deep_ep.hybrid_ep_buffer (HybridEPBuffer, indices_to_map) belongs to DeepEP's hybrid-ep "
    "branch, which deep_comm does not offer: use the backend of Buffer (deepep) or of "
    "ElasticBuffer (deepep_v2)",
    name=__name__,
)
