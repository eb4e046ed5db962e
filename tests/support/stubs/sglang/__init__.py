"""Stand-in for SGLang 0.5.23: the interfaces that deep_comm.integrations.sglang meets."""
