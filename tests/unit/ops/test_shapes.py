"""Operations on the meta device give the same tensors when their shapes are remembered."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from inweave.ops.tensors.shapes import run_on_meta  # noqa: E402

aten = torch.ops.aten


def meta(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.shape, result.stride(), result.dtype, result.untyped_storage().nbytes(), result.device
    return [described(each) if isinstance(each, torch.Tensor) else each for each in result]


CALLS = {
    "product": lambda: (aten.mm.default, (meta(3, 4), meta(4, 5))),
    "transposed": lambda: (aten.add.Tensor, (meta(4, 3).t(), meta(4, 3).t())),
    "in half": lambda: (aten.mm.default, (meta(3, 4, dtype=torch.float16), meta(4, 5, dtype=torch.float16))),
    "norm": lambda: (aten.native_group_norm.default, (meta(2, 8, 5, 5), meta(8), meta(8), 2, 8, 25, 4, 1e-5)),
    "attention": lambda: (aten._scaled_dot_product_flash_attention.default, (meta(1, 2, 7, 8),) * 3),
    "by a whole number": lambda: (aten.mul.Scalar, (meta(3, dtype=torch.int64), 2)),
    "by a fraction": lambda: (aten.mul.Scalar, (meta(3, dtype=torch.int64), 2.0)),
    "list of tensors": lambda: (aten.cat.default, ([meta(2, 3), meta(4, 3)], 0)),
    "other list": lambda: (aten.cat.default, ([meta(2, 3), meta(2, 4)], 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_torch(name: str) -> None:
    for _ in range(3):
        operation, args = CALLS[name]()
        result, expected = run_on_meta(operation, args, {}), operation(*args)
        assert type(result) is type(expected) and described(result) == described(expected)


def test_results_are_new_tensors() -> None:
    x = meta(3, 3)
    results = [run_on_meta(aten.relu.default, (x,), {}) for _ in range(3)]
    storages = {each.untyped_storage()._cdata for each in (x, *results)}
    assert len(storages) == 4


def test_views_and_changed_arguments_stay_those_of_torch() -> None:
    for _ in range(3):
        x = meta(2, 6)
        for operation, args in ((aten.view.default, (x, [3, 4])), (aten._unsafe_view.default, (x, [3, 4]))):
            assert run_on_meta(operation, args, {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert run_on_meta(aten.add_.Tensor, (x, meta(2, 6)), {}) is x


def test_other_devices_and_data_are_left_to_torch() -> None:
    for _ in range(2):
        assert float(run_on_meta(aten.add.Tensor, (torch.ones(()), 1), {})) == 2.0
        assert run_on_meta(aten.zeros.default, ([2],), {"device": torch.device("cpu")}).device.type == "cpu"
        with pytest.raises(RuntimeError):
            run_on_meta(aten._local_scalar_dense.default, (meta(1),), {})
