"""History: the depths and rates of a topic by the minute, sampled by the workers and stored in Redis.

Once a minute one worker reads the depths and the ledger of a topic's slots and stores their sums as one record of some 150 bytes
in a hash. Every worker counts how late messages were delivered, for the next record, and together with the duration of listeners
also in counts that are never reset, for histograms of other systems. Rates are differences of the ledger's counters, so nothing
is counted twice or lost, whichever worker samples. A minute that was not sampled is a gap.

Size: some 250 bytes per topic and minute in Redis, 0.7 MB per topic for 48 hours. Cost: a script of 1 to 2 ms
per 256 slots and minute. With more than 65,536 slots, every second (fourth, …) is read and the sums are
scaled. Above 4,096 slots the reading is spread over the minute.
"""

from .minute_record import EDGES_MS, Depth, TimesCount, sampling
from .queries import (
    LONGEST_GAP_MINUTES,
    HistoryTotals,
    Lateness,
    Latest,
    Minute,
    Rates,
    SummedHour,
    SummedMinute,
    last_rates,
    latest,
    read,
    read_last,
    summed,
    times,
    totals,
)

__all__ = [
    "EDGES_MS",
    "LONGEST_GAP_MINUTES",
    "Depth",
    "HistoryTotals",
    "Lateness",
    "Latest",
    "Minute",
    "Rates",
    "SummedHour",
    "SummedMinute",
    "TimesCount",
    "last_rates",
    "latest",
    "read",
    "read_last",
    "sampling",
    "summed",
    "times",
    "totals",
]
