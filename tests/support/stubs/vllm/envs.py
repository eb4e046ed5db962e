"""Stand-in for vLLM's settings."""

VLLM_TRITON_USE_TD: bool | None = None
