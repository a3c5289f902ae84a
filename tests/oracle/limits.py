"""MAX_RATE and MAX_IN_FLIGHT of a topic, and buckets from which any caller spends."""

from __future__ import annotations

import math
import re

from django_rmq.core.model.keys import bucket_key, limits_key
from django_rmq.core.model.replies import Allowance
from tests.oracle.keyspace import Hash, Memory, score_text

_PERMITS = re.compile(rb"(\d+) (\d+) (\d+)")


def allow(
    memory: Memory,
    topic: str,
    worker: str,
    rate: str,
    tokens: int,
    in_flight: int,
    in_use: int,
    wanted: int,
    lease_ms: int,
) -> Allowance:
    with memory.hash(limits_key(memory.prefix, topic)) as limits:
        now_us = memory.micros()
        given, wait_us = _tokens(limits, float(rate), tokens, now_us)
        if not in_flight:
            return Allowance(given, wait_us, wanted, False)
        name, now_ms = f"worker:{worker}".encode(), now_us // 1000
        others, waiting, crew = _others(limits, name, now_ms)
        if wanted:
            crew.append((wanted, name))
        fair = _fair_share(in_flight, crew, (wanted, name), now_us // 1_000_000)
        permits = min(fair, max(0, in_flight - others))
        held = max(in_use, permits)
        if held + wanted:
            limits[name] = b"%d %d %d" % (held, wanted, now_ms + lease_ms)
        else:
            limits.pop(name, None)
        return Allowance(given, wait_us, permits, waiting)


def _tokens(limits: Hash, rate: float, tokens: int, now_us: int) -> tuple[int, int]:
    """Take up to ``tokens`` from the bucket; return how many, and the time in µs until the next one."""
    if not rate:
        return tokens, 0
    each = 1_000_000 / rate
    empty = _empty_since(limits, now_us, max(each, 100_000))
    given = min(tokens, max(0, math.floor((now_us - empty) / each + 0.000001)))
    empty += given * each
    limits[b"empty"] = score_text(empty).encode()
    return given, max(1, math.ceil(empty + each - now_us)) if given < tokens else 0


def _empty_since(bucket: Hash, now_us: int, full_us: float) -> float:
    """Return when a bucket that fills in ``full_us`` was last empty.

    A time in the future (a clock set back) means full.
    """
    empty = float(bucket.get(b"empty", b"inf"))
    if empty > now_us + full_us:
        empty = now_us - full_us
    return max(empty, now_us - full_us)


def _others(limits: Hash, ours: bytes, now_ms: int) -> tuple[int, bool, list[tuple[int, bytes]]]:
    """Return what other workers hold, whether one waits, and how much each wants; forget those whose lease is over."""
    total, waiting, crew = 0, False, []
    for name, value in list(limits.items()):
        match = _PERMITS.fullmatch(value)
        if match is None or name == ours:
            continue
        held, wants, ends = map(int, match.groups())
        if ends <= now_ms:
            del limits[name]
            continue
        total += held
        waiting = waiting or wants > held
        if wants:
            crew.append((wants, name))
    return total, waiting, crew


def _fair_share(limit: int, crew: list[tuple[int, bytes]], us: tuple[int, bytes], now_s: int) -> int:
    """Return this worker's share: a worker that wants less than an even share gets it all, the others share the rest."""
    left, crew = limit, sorted(crew)
    for at, (wants, _) in enumerate(crew):
        equals = crew[at:]
        share = left // len(equals)
        if wants > share:
            if us[0] <= share:
                break
            # The indivisible remainder rotates, two seconds for each worker.
            rank = sum(name < us[1] for _, name in equals)
            turn = now_s // 2 * 40503 % 65536 // 256
            return share + ((rank + turn) % len(equals) < left - share * len(equals))
        left -= wants
    return us[0]


def end_permits(memory: Memory, topic: str, worker: str, ended: int, lease_ms: int) -> int:
    with memory.hash(limits_key(memory.prefix, topic)) as limits:
        name = f"worker:{worker}".encode()
        match = _PERMITS.fullmatch(limits.pop(name, b""))
        held, wants, ends = map(int, match.groups()) if match else (0, 0, 0)
        left = max(0, held - ended)
        if left:
            until_ms = memory.now_ms() + lease_ms if lease_ms else ends
            limits[name] = b"%d %d %d" % (left, wants, until_ms)
        return left


def spend(memory: Memory, spender: str, each: str, size: int, wanted: int) -> int:
    each_us = float(each)
    with memory.hash(bucket_key(memory.prefix, spender)) as bucket:
        now_us = memory.micros()
        empty = _empty_since(bucket, now_us, each_us * size) + each_us * wanted
        if empty > now_us:
            return math.ceil(empty - now_us)
        bucket[b"empty"] = score_text(empty).encode()
        return 0
