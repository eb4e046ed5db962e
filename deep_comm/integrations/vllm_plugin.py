"""The vLLM plugin: what every process of a vLLM server calls when it starts.

Apart from the adapter, so that nothing of it is imported unless asked for.
"""

from deep_comm.settings import env


def register_if_asked() -> None:
    """With DEEP_COMM_VLLM=1, deep_comm.integrations.vllm.register(); else nothing."""
    if env.VLLM.get():
        from deep_comm.integrations.vllm import register

        register()
