"""A process group of one host opens no port that others could reach."""

from __future__ import annotations

import os

import pytest

from onefold.core.world import World
from onefold.exchange.group import gloo_on_loopback

NAME = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


def test_gloo_stays_on_one_host_while_the_group_is_made() -> None:
    with gloo_on_loopback(World(one_host=True)):
        assert os.environ[NAME] == "lo"
    assert NAME not in os.environ


def test_the_environment_is_put_back_after_an_error_too() -> None:
    with pytest.raises(ArithmeticError), gloo_on_loopback(World(one_host=True)):
        raise ArithmeticError
    assert NAME not in os.environ


@pytest.mark.parametrize("said", ["eth1", ""])
def test_what_the_user_has_said_stands(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, said)
    with gloo_on_loopback(World(one_host=True)):
        assert os.environ[NAME] == said
    assert os.environ[NAME] == said


def test_several_hosts_reach_each_other_as_gloo_finds_best() -> None:
    with gloo_on_loopback(World(one_host=False)):
        assert NAME not in os.environ
