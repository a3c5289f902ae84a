"""Compares every balance with the list of intended transfers. It uses nothing of the package: SQL and arithmetic.

python tests/e2e/bank/audit.py LIST ACCOUNTS PORT
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import psycopg


def intended(path: Path, accounts: int) -> dict[int, int]:
    """Return the balance of each account after all transfers of the list."""
    balances = dict.fromkeys(range(1, accounts + 1), 0)
    with path.open() as file:
        for source, target, amount in csv.reader(file):
            balances[int(source)] -= int(amount)
            balances[int(target)] += int(amount)
    return balances


def found(port: int) -> dict[int, int]:
    """Return the balances in the database."""
    with psycopg.connect(host="127.0.0.1", port=port, user="shop", dbname="shop") as connection:
        return dict(connection.execute("SELECT id, balance FROM bank_account").fetchall())


def main(path: Path, accounts: int, port: int) -> int:
    """Print the accounts that are wrong; return 1 if there are any."""
    wanted, balances = intended(path, accounts), found(port)
    wrong = {name for name in wanted | balances if wanted.get(name) != balances.get(name)}
    for name in sorted(wrong):
        print(f"account {name}: {balances.get(name)} instead of {wanted.get(name)}")
    print(f"{len(wrong)} of {len(wanted)} balances are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
