"""``deep_comm bench``: correctness first, then time; a table and, if asked, JSON."""
