"""Structured text from a seed: arithmetic, JSON, tables. What a reader can foresee of it, a model can learn."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable

WORDS = {
    "name": "Ada Alan Barbara Carl Dana Edsger Emmy Frances Grace Hedy Ivan John Katherine Linus Margaret Niklaus Radia Sofia Tim Vera",
    "city": "Athens Bergen Cairo Delhi Dublin Geneva Hanoi Kyoto Lagos Lima Lisbon London Madrid Nairobi Oslo Paris Porto Quito Rome",
    "item": "anchor basket cable desk engine filter guitar hammer kettle ladder mirror needle paper rope saddle tablet valve wheel",
    "status": "active blocked closed delayed open pending shipped",
}
CHOICES = {field: words.split() for field, words in WORDS.items()}
NUMBERS: dict[str, Callable[[random.Random], int | float | bool]] = {
    "quantity": lambda rng: rng.randint(1, 20),
    "price": lambda rng: rng.randint(4, 400) / 4,
    "paid": lambda rng: rng.random() < 0.5,
}


def value(field: str, rng: random.Random) -> str | int | float | bool:
    """Of a field of a record."""
    return rng.choice(CHOICES[field]) if field in CHOICES else NUMBERS[field](rng)


def records(rng: random.Random) -> list[dict]:
    """Rows with the same fields in the same order; ids and dates count up."""
    fields = rng.sample([*CHOICES, *NUMBERS], rng.randint(2, 5))
    first, day = rng.randint(1, 900), datetime.date(2020, 1, 1) + datetime.timedelta(rng.randint(0, 2000))
    dated = rng.random() < 0.5
    return [
        {
            "id": first + i,
            **({"date": str(day + datetime.timedelta(i))} if dated else {}),
            **{field: value(field, rng) for field in fields},
        }
        for i in range(rng.randint(8, 24))
    ]


def json_text(rng: random.Random) -> str:
    """Records as JSON, indented or one a line."""
    rows = records(rng)
    if rng.random() < 0.5:
        return json.dumps({"count": len(rows), "records": rows}, indent=2)
    return "\n".join(json.dumps(row) for row in rows)


def table(rng: random.Random) -> str:
    """Records as a Markdown table or comma-separated."""
    rows = records(rng)
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    if rng.random() < 0.5:
        return "\n".join(",".join(line) for line in lines)
    lines.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sums(rng: random.Random) -> str:
    """Additions, subtractions and products, the left operand counting up."""
    symbol, apply = rng.choice((("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__)))
    first, step, other = rng.randint(1, 99), rng.randint(1, 9), rng.randint(2, 30)
    numbers = (first + step * i for i in range(rng.randint(16, 48)))
    return "\n".join(f"{number} {symbol} {other} = {apply(number, other)}" for number in numbers)


def ledger(rng: random.Random) -> str:
    """A running total, line by line."""
    total, lines = rng.randint(0, 500), []
    for row in range(1, rng.randint(12, 32)):
        item, amount = rng.choice(CHOICES["item"]), rng.randint(1, 50)
        lines.append(f"{row}. {item}: {total} + {amount} = {total + amount}")
        total += amount
    return "\n".join(lines)


def structured(name: str) -> str:
    """Two to four pieces of one of the four sorts; the name is the seed."""
    rng = random.Random(name)
    make = rng.choice((json_text, table, sums, ledger))
    return "\n\n".join(make(rng) for _ in range(rng.randint(2, 4)))
