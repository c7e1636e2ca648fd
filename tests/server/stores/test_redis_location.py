"""URLs of Redis: no error shows a part of the password."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histospec.server.stores.redis.location import Location

PASSWORDS = st.text("ab1/?#@:[]%,&=\\ ℀é;").map(lambda middle: f"Pass{middle}Word")
URLS = ("redis://user:{}@host:1/0", "rediss+cluster://:{}@a:1,b:2?replicas=1", "redis://u:{}@host?x=1", "redis://{}@h")


@given(PASSWORDS, st.sampled_from(URLS))
def test_neither_a_message_nor_a_name_shows_a_part_of_a_password(password: str, url: str) -> None:
    try:
        said = str(Location.parse(url.format(password)))
    except ValueError as error:
        said = str(error)
    assert "Pass" not in said
    assert "Word" not in said


def test_a_file_of_authorities_may_have_any_name() -> None:
    assert Location.parse("rediss://host?ca=/etc/a@b.pem").ca == "/etc/a@b.pem"


@pytest.mark.parametrize("password", ["a/b", "a?b", "a#b"])
def test_a_password_that_must_be_quoted_is_told_so(password: str) -> None:
    with pytest.raises(ValueError, match="write %2F %3F %23"):
        Location.parse(f"redis://user:{password}@host:1")
