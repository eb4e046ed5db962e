"""The module paths of V2."""
