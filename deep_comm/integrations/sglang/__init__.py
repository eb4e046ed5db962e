"""SGLang: a dispatcher over deep_comm that emits the formats of its DeepEP dispatcher.

``register()`` puts it in the place of that one in this process;
``python -m deep_comm.integrations.sglang.launch`` starts a server whose processes all do so. See
docs/guide/sglang.md.
"""

from deep_comm.integrations.sglang.dispatcher import DeepCommDispatcher
from deep_comm.integrations.sglang.plugin import register

__all__ = ["DeepCommDispatcher", "register"]
