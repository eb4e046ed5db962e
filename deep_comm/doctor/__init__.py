"""What this machine has and whether deep_comm works on it: ``python -m deep_comm.doctor``."""
