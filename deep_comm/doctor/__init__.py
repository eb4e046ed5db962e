"""What this machine has and whether deep_comm works on it: ``deep_comm doctor``."""
