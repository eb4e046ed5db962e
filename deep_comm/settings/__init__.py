"""What a user or the environment sets, and the rules it must keep."""
