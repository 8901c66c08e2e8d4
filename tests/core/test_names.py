"""A model's own names, whatever of it is compiled."""

from __future__ import annotations

from onefold.core.names import own_name
from tests.tables import for_each


@for_each(
    ("name", "own"),
    [
        ("weight", "weight"),
        ("encoder.0.weight", "encoder.0.weight"),
        ("_orig_mod.weight", "weight"),
        ("_orig_mod.encoder._orig_mod.weight", "encoder.weight"),
        ("encoder._orig_mod._orig_mod.weight", "encoder.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("_orig_mod", "_orig_mod"),  # a parameter of the user's own that is called so
        ("encoder._orig_mod", "encoder._orig_mod"),
        ("", ""),
    ],
)
def test_words_of_the_compiler_are_taken_out(name: str, own: str) -> None:
    assert own_name(name) == own
    assert own_name(own) == own
