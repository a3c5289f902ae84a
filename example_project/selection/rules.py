"""The language of rules: read into a small tree, never run as code.

    price < 20 and stock >= 1 and (title contains "mug" or title contains "bowl")
    rating between 4 and 5 and not stock in (0, 1)
    title starts with "amber" and rating is known

Text is compared without regard to case. A comparison with a fact that is not known is false, and so its `not` is true.
The same tree is evaluated here, item by item, and by Spark, as a column (`example_project.selection.columns`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

Value = Decimal | int | str
Facts = Mapping[str, Value | None]
"""Field -> what is known of it; texts folded by `str.casefold`."""

NUMBERS = ("price", "stock", "rating")
TEXTS = ("title",)
FIELDS = NUMBERS + TEXTS


def folded(text: str) -> str | None:
    """Return a text as rules compare it; nothing is known of an empty one."""
    return text.casefold() or None


LONGEST = 1_000
DEEPEST = 16

COMPARISONS: dict[str, Callable[[Value, Value], bool]] = {
    "=": lambda fact, value: fact == value,
    "!=": lambda fact, value: fact != value,
    "<": lambda fact, value: fact < value,  # type: ignore[operator]
    "<=": lambda fact, value: fact <= value,  # type: ignore[operator]
    ">": lambda fact, value: fact > value,  # type: ignore[operator]
    ">=": lambda fact, value: fact >= value,  # type: ignore[operator]
}

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>-?\d{1,9}(?:\.\d{1,4})?(?![\w.]))
    | (?P<text>"[^"\n]*"|'[^'\n]*')
    | (?P<word>[A-Za-z_]+)
    | (?P<sign><=|>=|!=|[=<>(),])
    )""",
    re.VERBOSE,
)


class RuleError(ValueError):
    """The rule cannot be read; the message says what was found, where, and what was wanted."""


@dataclass(frozen=True)
class Comparison:
    """One fact against some values. `word` is a key of COMPARISONS, or `between`, `in`, `contains`, `starts`, `known`."""

    field: str
    word: str
    values: tuple[Value, ...] = ()

    def holds(self, facts: Facts) -> bool:
        fact = facts[self.field]
        if fact is None:
            return False
        match self.word:
            case "known":
                return True
            case "between":
                low, high = self.values
                return COMPARISONS["<="](low, fact) and COMPARISONS["<="](fact, high)
            case "in":
                return fact in self.values
            case "contains":
                return str(self.values[0]) in str(fact)
            case "starts":
                return str(fact).startswith(str(self.values[0]))
        return COMPARISONS[self.word](fact, self.values[0])


@dataclass(frozen=True)
class Negation:
    """True where its part is not."""

    part: Rule

    def holds(self, facts: Facts) -> bool:
        return not self.part.holds(facts)


@dataclass(frozen=True)
class Conjunction:
    """True where all its parts are."""

    parts: tuple[Rule, ...]

    def holds(self, facts: Facts) -> bool:
        return all(part.holds(facts) for part in self.parts)


@dataclass(frozen=True)
class Disjunction:
    """True where one of its parts is."""

    parts: tuple[Rule, ...]

    def holds(self, facts: Facts) -> bool:
        return any(part.holds(facts) for part in self.parts)


Rule = Comparison | Negation | Conjunction | Disjunction


def fields_of(rule: Rule) -> list[str]:
    """Return the fields that a rule looks at, in its order."""
    match rule:
        case Comparison(field):
            return [field]
        case Negation(part):
            return fields_of(part)
    return list(dict.fromkeys(field for part in rule.parts for field in fields_of(part)))


def reason(rule: Rule, facts: Facts) -> str:
    """Return what the rule was told, in words: `price 19.50, stock 3`."""
    return ", ".join(
        f"no {field}" if facts[field] is None else f"{field} {facts[field]}" for field in fields_of(rule)
    )


def parse(text: str) -> Rule:
    """Read a rule. Raises RuleError."""
    if len(text) > LONGEST:
        raise RuleError(f"A rule has at most {LONGEST} characters, but this one has {len(text)}.")
    return _Reader(text).rule()


class _Token(NamedTuple):
    kind: str
    text: str
    place: int

    def __str__(self) -> str:
        return f"{self.text!r} at character {self.place + 1}" if self.text else "the end of the rule"


class _Reader:
    """Recursive descent: or, and, not, then one comparison or a parenthesis."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def rule(self) -> Rule:
        found = self._either()
        if self._token.kind != "end":
            raise RuleError(f"Expected 'and', 'or' or the end of the rule, found {self._token}.")
        return found

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += token.kind != "end"
        return token

    def _accept(self, *texts: str) -> bool:
        """Take these tokens if they come next."""
        coming = self._tokens[self._next : self._next + len(texts)]
        if [token.text.lower() for token in coming if token.kind in ("word", "sign")] != list(texts):
            return False
        self._next += len(texts)
        return True

    def _expect(self, *texts: str) -> None:
        if not self._accept(*texts):
            raise RuleError(f"Expected '{' '.join(texts)}', found {self._token}.")

    def _either(self) -> Rule:
        parts = [self._both()]
        while self._accept("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Disjunction(tuple(parts))

    def _both(self) -> Rule:
        parts = [self._one()]
        while self._accept("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Conjunction(tuple(parts))

    def _one(self) -> Rule:
        self._depth += 1
        if self._depth > DEEPEST:
            raise RuleError(f"'not' and parentheses can be nested at most {DEEPEST} deep.")
        if self._accept("not"):
            found: Rule = Negation(self._one())
        elif self._accept("("):
            found = self._either()
            self._expect(")")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Rule:
        token = self._take()
        field = token.text.lower()
        if token.kind != "word" or field not in FIELDS:
            raise RuleError(f"Expected one of {', '.join(FIELDS)}, found {token}.")
        if self._accept("is", "known"):
            return Comparison(field, "known")
        if self._accept("is", "not", "known"):
            return Negation(Comparison(field, "known"))
        negated = self._accept("not")
        found = self._worded(field)
        if negated:
            if found is None:
                raise RuleError(f"After 'not', expected {self._words(field)}, found {self._token}.")
            return Negation(found)
        if found is not None:
            return found
        sign = self._take()
        wanted = tuple(COMPARISONS) if field in NUMBERS else ("=", "!=")
        if sign.text not in wanted:
            raise RuleError(
                f"After {field}, expected {' '.join(wanted)}, {self._words(field)} or 'is known', found {sign}."
            )
        return Comparison(field, sign.text, (self._value(field),))

    @staticmethod
    def _words(field: str) -> str:
        return "'between', 'in'" if field in NUMBERS else "'in', 'contains', 'starts with'"

    def _worded(self, field: str) -> Comparison | None:
        """A comparison by a word, if one comes next."""
        if self._accept("in"):
            self._expect("(")
            values = [self._value(field)]
            while self._accept(","):
                values.append(self._value(field))
            self._expect(")")
            return Comparison(field, "in", tuple(values))
        if field in NUMBERS:
            if not self._accept("between"):
                return None
            low = self._value(field)
            self._expect("and")
            high = self._value(field)
            if not COMPARISONS["<="](low, high):
                raise RuleError(f"No number is between {low} and {high}: put the smaller one first.")
            return Comparison(field, "between", (low, high))
        for words in (("contains",), ("starts", "with")):
            if self._accept(*words):
                return Comparison(field, words[0], (self._value(field),))
        return None

    def _value(self, field: str) -> Value:
        token = self._take()
        if field in NUMBERS:
            if token.kind != "number":
                raise RuleError(f"{field} is compared with numbers such as 20 or 4.5, found {token}.")
            return Decimal(token.text)
        if token.kind != "text":
            raise RuleError(f'{field} is compared with text in quotes such as "mug", found {token}.')
        if len(token.text) == 2:
            raise RuleError(f"The text at character {token.place + 1} is empty.")
        return token.text[1:-1].casefold()


def _tokens(text: str) -> list[_Token]:
    found = []
    place, end = 0, len(text.rstrip())
    if not end:
        raise RuleError("The rule is empty.")
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            rest = text[place:end].lstrip()
            raise RuleError(f"Cannot read {rest[:20]!r} at character {end - len(rest) + 1}.")
        kind = str(match.lastgroup)
        found.append(_Token(kind, match[kind], match.start(kind)))
        place = match.end()
    return [*found, _Token("end", "", end)]
