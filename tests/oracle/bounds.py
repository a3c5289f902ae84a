"""Numbers that only scripts know; `test_scripts` compares them with the Lua."""

from __future__ import annotations

CLAIM_STEP_BYTES = 4_194_304
"""The maximum number of bytes that one script of a claim moves, by estimate. Renaming a whole Store moves none."""

CLAIM_LARGE, CLAIM_LARGE_STEP_BYTES = 16_384, 1_048_576
"""If the longest message has more bytes than the first, a script of a claim moves at most the second, by estimate."""

GATE = 1 << 53
"""``sleeping_until`` of a caller that was answered busy, and waits for the gate to open."""
