"""The chart and the server compute memory alike: the server does not warn about what the chart accepts."""

from fractions import Fraction

import pytest

from histospec.server.settings.budget import check_budget
from tests.support.charts import options, refusal, render
from tests.support.quantities import exact, size

MACHINE = 2**50


@pytest.mark.parametrize("limit", ["10Gi", "12Gi", "20Gi", "4Gi", "2800Mi", "68Gi", "1Gi", "1Ti"])
def test_what_the_chart_computes_it_takes_and_so_does_the_server(limit: str) -> None:
    given = options(render("--set", f"resources.limits.memory={limit}"))["memory"]
    assert options(render("--set", f"resources.limits.memory={limit},options.memory={given}"))["memory"] == given
    assert check_budget(size(given), True, int(exact(limit)), MACHINE) == ""


@pytest.mark.parametrize("limit", ["10Gi", "15Gi", "68Gi", "2Gi", "100G"])
def test_the_server_has_no_word_against_the_largest_index_that_the_chart_takes(limit: str) -> None:
    said = refusal("--set", f"options.memory=4TiB,resources.limits.memory={limit}")
    most = said.partition("Give it at most ")[2].partition(",")[0]
    assert check_budget(size(most), True, int(exact(limit)), MACHINE) == ""
    assert size(most) > exact(limit) * Fraction(6, 10)
