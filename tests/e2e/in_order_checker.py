"""python in_order_checker.py LOG ENTITIES MESSAGES: whether each entity was served in order. It knows nothing of the queue.

A line of the log is "begins ENTITY NUMBER" or "succeeds ENTITY NUMBER", in the order in which it happened. Per entity, the
first successes must be 1, 2, 3 …, each message must have one, and nothing may begin before its predecessor has succeeded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


def check(log: Path, entities: int, messages: int) -> dict[str, Any]:
    """Return what is wrong with a log, and how often things happened."""
    done: defaultdict[int, int] = defaultdict(int)
    wanted = [messages // entities + (entity < messages % entities) for entity in range(entities)]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with log.open() as lines:
        for line in lines:
            word, entity_text, number_text = line.split()
            entity, number = int(entity_text), int(number_text)
            counts[word] += 1
            if number > done[entity] + 1:
                wrong.append(
                    f"{number} of entity {entity} {word}, but {done[entity]} was the last to succeed"
                )
            elif word == "succeeds" and number == done[entity] + 1:
                done[entity] = number
            elif word == "succeeds":
                counts["repeated"] += 1
    missing = sum(wanted) - sum(done.values())
    return {
        "messages": sum(done.values()),
        "missing": missing,
        "begun": counts["begins"],
        "repeated": counts["repeated"],
        "out of order": len(wrong),
        "examples": wrong[:5],
        "in order": not wrong and missing == 0,
    }


if __name__ == "__main__":
    found = check(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(found))
    sys.exit(0 if found["in order"] else 1)
