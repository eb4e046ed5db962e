"""The fastest Configs of this machine, for Buffers to use: ``deep_comm tune``."""
