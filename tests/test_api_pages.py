"""The pages that are made from docstrings have everything that is public."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest

import onefold


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_api = pytest.importorskip("docs.make_api", reason="pdoc is not installed")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("api")
    with warnings.catch_warnings():  # of the libraries that are imported
        make_api.make(folder)
    return folder


def test_every_public_name_has_its_place(pages: Path) -> None:
    page = (pages / "onefold.html").read_text()
    modules = {name for name in onefold.__all__ if inspect.ismodule(getattr(onefold, name))}
    assert modules == {"errors", "losses"}
    assert {name for name in set(onefold.__all__) - modules if f'id="{name}"' not in page} == set()
    for name in modules:
        page = (pages / "onefold" / f"{name}.html").read_text()
        public = getattr(onefold, name).__all__
        assert {each for each in public if f'id="{each}"' not in page} == set()


def test_methods_of_the_trainer_are_explained_or_linked(pages: Path) -> None:
    own = (pages / "onefold.html").read_text()
    inherited = (pages / "onefold" / "trainedmodel.html").read_text()
    public = {name for name in dir(onefold.Trainer) if not name.startswith("_")}
    assert {"step", "save", "on_step"} <= public
    for name in public:
        if name in vars(onefold.Trainer):
            assert f'id="Trainer.{name}"' in own, name
        else:
            assert f'id="TrainedModel.{name}"' in inherited, name
            assert f'href="onefold/trainedmodel.html#TrainedModel.{name}"' in own, name


def test_arguments_are_lists(pages: Path) -> None:
    page = (pages / "onefold.html").read_text()
    assert "<li><strong>shards:</strong>" in page
    assert "Args:" not in page
