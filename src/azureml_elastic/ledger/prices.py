"""Prices of nodes, as a file that their owner writes; none are shipped, as they differ by region, contract and date."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.errors import UsageError

__all__ = ["Prices", "Tier", "load_prices"]

Tier = Literal["dedicated", "low_priority"]
"""Tier of a node; that of serverless Spot jobs is ``low_priority``."""

_Price = Annotated[
    Decimal, BeforeValidator(lambda value: str(value) if isinstance(value, float) else value), Field(ge=0)
]


class Prices(ConfigModel):
    """Prices per hour of one node.

    Args:
        currency: currency, such as ``USD``.
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
