"""The budget of the index, compared with the memory of the process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histospec.server.errors import ConfigError
from histospec.server.settings.budget import DEFAULT, ROUND, check_budget, default_budget, fitting, needed
from tests.support.servers import Starter

GIB = 1 << 30
LIMITS = st.integers(1 << 20, 1 << 47)


@given(LIMITS)
def test_the_default_fits_wherever_a_server_fits(limit: int) -> None:
    budget = default_budget(limit)
    assert 1 << 20 <= budget <= DEFAULT
    assert budget % ROUND == 0
    if limit >= GIB:
        assert check_budget(budget, False, limit, 1 << 47) == ""
    if limit >= 10 * GIB:
        assert budget == DEFAULT


@given(LIMITS)
def test_what_is_said_to_fit_does_and_hardly_more_would(limit: int) -> None:
    if limit >= GIB:
        assert needed(fitting(limit)) <= limit < needed(fitting(limit) + 2 * ROUND)


@given(LIMITS, LIMITS, LIMITS, st.booleans())
def test_a_budget_is_refused_only_where_it_fills_its_control_group(
    budget: int, group: int, machine: int, given_: bool
) -> None:
    limit = min(group, machine)
    try:
        said = check_budget(budget, given_, group, machine)
    except ConfigError:
        assert given_
        assert budget >= group
    else:
        assert not (given_ and budget >= group)
        assert bool(said) == (needed(budget) > limit)
    assert bool(check_budget(budget, given_, None, machine)) == (needed(budget) > machine)


def test_a_large_process_keeps_15_percent_for_the_rest() -> None:
    """Above 19 GiB, 15 % of the whole are more than 512 MiB and 15 % of the index."""
    assert fitting(32 * GIB) == 27852 << 20
    assert check_budget(27852 << 20, True, 32 * GIB, 64 * GIB) == ""
    assert "set --memory to 27852MiB or less" in check_budget(28048 << 20, True, 32 * GIB, 64 * GIB)


def test_the_sentences_name_both_numbers_and_what_to_set() -> None:
    assert check_budget(8 * GIB, True, 10 * GIB, 64 * GIB) == ""
    assert check_budget(9 * GIB, True, 10 * GIB, 64 * GIB) == (
        "--memory 9GiB: with what it needs besides the index, the server may take 11110MiB, more than the control "
        "group (the container's memory limit) of 10GiB has; set --memory to 8459MiB or less, or give the process "
        "11110MiB"
    )
    assert "more than this machine of 10GiB has" in check_budget(64 * GIB, True, None, 10 * GIB)
    assert "more than this machine of 10GiB has" in check_budget(9 * GIB, True, 64 * GIB, 10 * GIB)
    with pytest.raises(ConfigError, match=r"--memory 10GiB: the index alone would fill the control group .* of 10GiB"):
        check_budget(10 * GIB, True, 10 * GIB, 64 * GIB)
    assert "--memory 10GiB: with what" in check_budget(10 * GIB, False, 10 * GIB, 64 * GIB)  # the user did not set it


def test_a_server_says_that_its_memory_does_not_fit(start_server: Starter) -> None:
    server = start_server("--memory", "100TiB")
    [warning] = [str(entry["event"]) for entry in server.log if entry.get("level") == "warning"]
    assert warning.startswith("--memory 102400GiB: with what it needs besides the index, the server may take ")
    assert "has; set --memory to " in warning
    modest = start_server("--memory", "64MiB")
    assert not [entry for entry in modest.log if entry.get("level") == "warning"]
