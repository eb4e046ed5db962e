"""Seeds under which something was found. They are run again in every test run, by name."""

from __future__ import annotations

# test_mixed_calls.py, programs under a schedule. What the second dispatch counted, before any peer
# had come, once lay over sums that the rail had yet to read; test_tier_calls.py makes sure that
# it would.
PROGRAMS = [2138, 2983]

# test_internode_simulated.py. Without the fence that joins the sums of several blocks into one
# chunk these fail.
CHUNKS = [23, 40, 69, 95]
