"""The bill of a run: what its nodes cost, and what the same work costs on dedicated nodes.

Prices are a file that their owner writes; none are shipped, as they differ by region, contract and date.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.errors import UsageError

Tier = Literal["dedicated", "low_priority"]
"""Tier of a node; that of serverless Spot jobs is ``low_priority``."""

# A float is taken as it is written: its exact value, such as 13.460000000000000852…, is nobody's price.
_Price = Annotated[
    Decimal, BeforeValidator(lambda value: str(value) if isinstance(value, float) else value), Field(ge=0)
]

_HOUR = Decimal(3600)


class Prices(ConfigModel):
    """Prices per hour of one node.

    Args:
        date: day of the prices; ``null`` if it is unknown.
        source: where the prices are from.
        per_hour: prices by VM size and tier, as in ``{"Standard_NC24rs_v3": {"dedicated": 13.46}}``.
    """

    currency: str = Field(min_length=1)
    date: date | None
    source: str = Field(min_length=1)
    per_hour: Mapping[str, Mapping[Tier, _Price]]

    def of(self, size: str | None, tier: Tier | None) -> Decimal | None:
        """Return the price of a VM size, whose case does not count, in a tier; ``None`` if the file has none."""
        if size is None or tier is None:
            return None
        by_size = {name.lower(): prices for name, prices in self.per_hour.items()}
        return by_size.get(size.lower(), {}).get(tier)


def load_prices(path: Path) -> Prices:
    """Read a JSON file of prices.

    Raises:
        UsageError: the file cannot be read, or a value is missing or invalid.
    """
    try:
        return Prices.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"The prices {path} cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"The prices {path} are invalid: {where}: {first['msg']}. A file has currency, date, source and per_hour, "
            'as in {"currency": "USD", "date": "2026-01-31", "source": "the price list of my region", "per_hour": '
            '{"Standard_NC24rs_v3": {"dedicated": 13.46, "low_priority": 2.69}}}.'
        ) from error


@dataclass(frozen=True)
class NodeUse:
    """Use of one node: for how long it was there, and its compute, VM size and tier, where they are known.

    Args:
        price_per_hour: price that the job gives for the node's pool, where no file has one.
        needed_seconds: time that the same work takes on nodes that are never lost; ``None`` for all of it.
        nodes: number of nodes that were there for as long.
    """

    seconds: float | Decimal
    pool: str = ""
    size: str | None = None
    tier: Tier | None = None
    price_per_hour: float | None = None
    needed_seconds: float | Decimal | None = None
    nodes: int = 1


@dataclass(frozen=True)
class BillLine:
    """Nodes of one pool, size and tier, with their node-hours and the price of one hour.

    ``dedicated_cost`` is the cost of the same work on dedicated nodes. Amounts without a known price are ``None``.
    """

    pool: str
    size: str | None
    tier: Tier | None
    nodes: int
    hours: Decimal
    price: Decimal | None
    cost: Decimal | None
    dedicated_cost: Decimal | None


@dataclass(frozen=True)
class Bill:
    """Bill of a run; nothing is rounded. The currency is empty without prices."""

    lines: tuple[BillLine, ...]
    currency: str = ""

    @property
    def hours(self) -> Decimal:
        """Node-hours of all lines."""
        return sum((line.hours for line in self.lines), Decimal())

    @property
    def cost(self) -> Decimal | None:
        """Cost of all nodes; ``None`` if a price is missing."""
        return _sum(line.cost for line in self.lines)

    @property
    def dedicated_cost(self) -> Decimal | None:
        """Cost of the same work on dedicated nodes; ``None`` if a price is missing."""
        return _sum(line.dedicated_cost for line in self.lines)

    @property
    def saving(self) -> Decimal | None:
        """Share of the dedicated cost that was saved; ``None`` if a price is missing."""
        cost, dedicated = self.cost, self.dedicated_cost
        return 1 - cost / dedicated if cost is not None and dedicated else None


def bill(uses: Iterable[NodeUse], prices: Prices | None = None) -> Bill:
    """Return the bill of a run's nodes.

    Args:
        prices: prices by size and tier, which take precedence over those of the job's pools; ``None`` for the latter.
    """
    groups: dict[tuple[str, str | None, Tier | None], list[NodeUse]] = {}
    for use in uses:
        groups.setdefault((use.pool, use.size, use.tier), []).append(use)
    lines = []
    for (pool, size, tier), members in sorted(groups.items(), key=lambda group: tuple(map(str, group[0]))):
        hours = _hours(members, [use.seconds for use in members])
        needed = _hours(members, [use.seconds if use.needed_seconds is None else use.needed_seconds for use in members])
        price = prices.of(size, tier) if prices is not None else None
        own = members[0].price_per_hour
        if price is None and own is not None and prices is None:
            price = Decimal(str(own))
        dedicated = prices.of(size, "dedicated") if prices is not None else None
        lines.append(
            BillLine(
                pool,
                size,
                tier,
                sum(use.nodes for use in members),
                hours,
                price,
                None if price is None else hours * price,
                None if dedicated is None else needed * dedicated,
            )
        )
    currency = prices.currency if prices is not None else "USD" if any(line.price is not None for line in lines) else ""
    return Bill(tuple(lines), currency)


def _hours(uses: Sequence[NodeUse], seconds: Sequence[float | Decimal]) -> Decimal:
    return sum((Decimal(str(each)) * use.nodes for use, each in zip(uses, seconds, strict=True)), Decimal()) / _HOUR


def _sum(amounts: Iterable[Decimal | None]) -> Decimal | None:
    total = Decimal()
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total
