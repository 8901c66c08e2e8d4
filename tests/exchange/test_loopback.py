"""A process group of one host opens no port that others could reach."""

import contextlib
import os

import pytest

from onefold.core.context import LaunchContext
from onefold.exchange.group import gloo_on_loopback
from tests.tables import for_each

NAME = "GLOO_SOCKET_IFNAME"


@for_each(
    ("one_host", "said", "inside"),
    [(True, None, "lo"), (True, "eth1", "eth1"), (True, "", ""), (False, None, None)],
)
def test_gloo_stays_on_one_host_while_the_group_is_made(
    one_host: bool, said: str | None, inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, said or "")
    if said is None:
        monkeypatch.delenv(NAME)
    with contextlib.suppress(ArithmeticError), gloo_on_loopback(LaunchContext(one_host=one_host)):
        assert os.environ.get(NAME) == inside
        raise ArithmeticError
    assert os.environ.get(NAME) == said
