"""How many samples a payload holds, and what cannot be seen."""

from dataclasses import dataclass

import numpy as np
import torch

from onefold.core.structure import Count, count_of

N, K, T, F = 8, 5, 3, 4
ALL, UNSURE = Count(N), Count(N, sure=False)


@dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor | None = None


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.zeros(count, *shape)


PICTURE, BOXES = rows(3, 4, 4), {"boxes": rows(2, 4)}
NESTED = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)


def test_samples_are_counted_where_that_is_possible() -> None:
    for payload, count in (
        # Some samples are left out.
        *((payload, Count(K)) for payload in (rows(K, F), np.zeros((K, F)), [rows(K, F)])),
        *((payload, Count(K)) for payload in ([rows(K, F), rows(K)], Item(rows(K, F)))),
        ([[rows(K, F), rows(K, 2)], rows(K)], Count(K)),
        ({"x": {"a": rows(K, F), "b": rows(K)}, "y": rows(K)}, Count(K)),
        ({"x": rows(K, F), "scale": torch.tensor(2.0), "name": "train"}, Count(K)),
        ([rows(0, F), rows(0)], Count(0)),
        (rows(1, F), Count(1)),
        ({"x": NESTED, "y": rows(2)}, Count(2)),
        # These may be all samples: packed, time first, a field of all, lists of samples.
        *((payload, ALL) for payload in (rows(N, F), rows(2 * N, F), rows(100))),
        *((payload, ALL) for payload in ([rows(T, N, F), rows(N)], {"x": rows(N), "w": rows(3)})),
        *((payload, ALL) for payload in (([PICTURE] * N, [BOXES] * N), [PICTURE] * N)),
        *((payload, ALL) for payload in ([(PICTURE, 1)] * N, [BOXES] * N, ["text"] * N)),
        # It cannot be told: time first, as many features, fields or samples.
        *((payload, UNSURE) for payload in ([rows(T, N, F), rows(T, N)], rows(K, N))),
        *((payload, UNSURE) for payload in ([PICTURE] * K, ([PICTURE] * K, [BOXES] * K))),
        *((payload, UNSURE) for payload in ([(PICTURE, 1)] * K, [(PICTURE, 1)], ["text"] * K)),
        *(
            (payload, UNSURE)
            for payload in ([rows(K, F), rows(K, F)], {"x": rows(T), "n": rows(K)})
        ),
    ):
        assert count_of(payload, N) == count


def test_the_dimension_of_samples_and_small_numbers_of_them() -> None:
    assert count_of([rows(T, N, F), rows(T, N)], N, dim=1) == ALL
    assert count_of([rows(T, K, F), rows(T, K)], N, dim=1) == Count(K)
    assert count_of([rows(1, F), rows(1)], 2) == Count(1)  # two fields are not two samples
    assert count_of([(PICTURE, rows(1))] * 2, 2) == count_of(NESTED, 2) == Count(2)
