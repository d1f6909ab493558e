"""Prices and bills."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.bill import NodeUse, Prices, bill, load_prices

FILE = {
    "currency": "EUR",
    "date": "2026-01-31",
    "source": "a contract",
    "per_hour": {"Standard_NC6": {"dedicated": 0.9, "low_priority": 0.18}, "Standard_D2": {"low_priority": 0.1}},
}
PRICES = Prices.model_validate(FILE)


def spot(seconds, size="Standard_NC6"):
    return NodeUse(seconds, "spot", size, "low_priority")


def test_a_file_has_prices_by_size_and_tier(tmp_path):
    (tmp_path / "prices.json").write_text(json.dumps(FILE))
    prices = load_prices(tmp_path / "prices.json")
    assert prices == PRICES
    assert prices.of("STANDARD_nc6", "low_priority") == Decimal("0.18")
    assert prices.of("Standard_D2", "dedicated") is None
    assert prices.of("Standard_X", "dedicated") is None
    assert prices.of(None, "dedicated") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"currency": ""}, "currency"),
        ({"date": "yesterday"}, "date"),
        ({"per_hour": {"Standard_NC6": {"cheap": 1}}}, "Standard_NC6.cheap"),
        ({"per_hour": {"Standard_NC6": {"dedicated": -1}}}, "greater than or equal to 0"),
        ({"prices": {}}, "prices is no field"),
    ],
)
def test_a_wrong_file_is_refused_with_the_value_and_an_example(tmp_path, change, said):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({**FILE, **change}))
    with pytest.raises(UsageError, match=said) as refused:
        load_prices(path)
    assert str(path) in str(refused.value)
    assert '"dedicated": 13.46' in str(refused.value)


def test_what_is_no_file_or_no_json_or_has_no_date_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_prices(tmp_path / "none.json")
    (tmp_path / "prices.json").write_text("no json")
    with pytest.raises(UsageError, match="invalid"):
        load_prices(tmp_path / "prices.json")
    (tmp_path / "prices.json").write_text(json.dumps({name: FILE[name] for name in FILE if name != "date"}))
    with pytest.raises(UsageError, match="date"):
        load_prices(tmp_path / "prices.json")


def test_a_bill_has_a_line_for_each_pool_size_and_tier():
    uses = [spot(3600), spot(1800), NodeUse(7200, "sure", "Standard_NC6", "dedicated")]
    made = bill(uses, PRICES)
    assert [(line.pool, line.nodes, line.hours, line.cost) for line in made.lines] == [
        ("spot", 2, Decimal("1.5"), Decimal("0.27")),
        ("sure", 1, Decimal(2), Decimal("1.8")),
    ]
    assert (made.cost, made.dedicated_cost, made.currency) == (Decimal("2.07"), Decimal("3.15"), "EUR")
    assert round(made.saving, 4) == Decimal("0.3429")


def test_without_a_price_there_are_hours_and_no_money():
    made = bill([spot(3600), NodeUse(3600)], PRICES)
    assert (made.hours, made.cost, made.saving) == (2, None, None)
    assert bill([spot(3600)]).lines[0].price is None
    assert bill([spot(60, "Standard_D2")], PRICES).saving is None
    assert bill([]).cost == 0
    assert bill([]).saving is None


def test_the_price_of_a_pool_counts_where_there_is_no_file():
    use = NodeUse(7200, "spot", price_per_hour=0.5)
    assert (bill([use]).cost, bill([use]).currency) == (1, "USD")
    assert bill([use], PRICES).cost is None


def test_dedicated_nodes_need_no_time_for_losses():
    lossy = NodeUse(7200, "spot", "Standard_NC6", "low_priority", needed_seconds=3600)
    made = bill([lossy], PRICES)
    assert (made.cost, made.dedicated_cost, made.saving) == (Decimal("0.36"), Decimal("0.9"), Decimal("0.6"))


@given(st.lists(st.floats(0, 1e6).map(lambda value: round(value, 3)), max_size=30))
def test_the_cost_is_that_of_the_parts_without_any_rounding(seconds):
    whole = bill([spot(each) for each in seconds], PRICES)
    parts = sum((bill([spot(each)], PRICES).cost for each in seconds), Decimal())
    assert whole.cost == pytest.approx(parts, abs=Decimal("1e-15"))
    assert whole.hours * Decimal("0.18") == pytest.approx(whole.cost, abs=Decimal("1e-15"))
