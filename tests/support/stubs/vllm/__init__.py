"""Stand-in for vLLM 0.33: the interfaces that deep_comm.integrations.vllm
meets, with their signatures.
"""
