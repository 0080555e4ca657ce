"""Weavers that share modules, and what a deleted Weaver leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import MergeStateError
from inweave.weights.source import FileSource
from tests.unit.weights.test_live_weights import EMB, HEAD, Net, bits, lin, merged, state


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is deleted must be gone by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_two_weavers_of_one_module_do_not_add_up() -> None:
    net, other = Net(), Net()
    base = bits(net)
    one, two = inweave.Weaver(net), inweave.Weaver({"unet": net, "te1": other})
    one.apply([(lin(), 0.5)])
    woven = bits(net)
    for stack in ([(lin(), 0.5)], [(HEAD, 1.0)], []):
        with pytest.raises(MergeStateError, match=r"lin\.(weight|bias): another Weaver has adapters merged into this"):
            two.apply(stack)
    with pytest.raises(MergeStateError, match="another Weaver"):
        two.restore()
    assert bits(net) == woven and one.woven and not two.woven
    one.apply([])
    assert two.apply([(lin(3), 1.0)]) == 2
    with pytest.raises(MergeStateError, match="another Weaver"):
        one.apply([(lin(), 0.5)])
    two.apply([])
    assert bits(net) == base and one.apply([(lin(), 0.5)]) == 2
    assert bits(net) == woven


def test_a_shared_submodule_is_known_and_separate_ones_are_free() -> None:
    class Outer(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.lin, self.head = shared, nn.Linear(8, 12, bias=False)

    one, two = Net(), Net()
    outer = Outer(one.lin)
    first, second, third = inweave.Weaver(one), inweave.Weaver(two), inweave.Weaver(outer)
    first.apply([(HEAD, 1.0)])  # not in `outer`
    assert second.apply([(lin(), 1.0)]) == 2 and third.apply([(HEAD, 1.0)]) == 1
    assert third.apply([(lin(), 1.0)]) == 3
    with pytest.raises(MergeStateError, match="another Weaver"):
        first.apply([(lin(), 1.0)])
    third.apply([])
    assert first.apply([(lin(), 1.0)]) == 3


def tied_to(one: Net, how: str) -> Net:
    """Return another model, whose `lin` is another module over the same numbers."""
    other = Net()
    if how == "parameter":
        other.lin.weight = one.lin.weight
    elif how == "data":
        other.lin.weight = nn.Parameter(one.lin.weight.data)
    else:
        other.lin.weight = nn.Parameter(one.lin.weight.data.T)
    return other


@pytest.mark.parametrize("how", ["parameter", "data"])
def test_weavers_of_two_modules_over_one_parameter_do_not_add_up(how: str) -> None:
    one, base = Net(), bits(Net())
    two = tied_to(one, how)
    first, second = inweave.Weaver(one), inweave.Weaver(two)
    first.apply([(lin(), 0.5)])
    woven = bits(one)
    for stack in ([(lin(), 0.5)], [(HEAD, 1.0)], []):
        with pytest.raises(MergeStateError, match=r"lin\.weight: another Weaver has .* module or parameter"):
            second.apply(stack)
    assert bits(one) == woven
    first.apply([])
    assert bits(one) == base and second.apply([(lin(), 0.5)]) == 2
    with pytest.raises(MergeStateError, match="another Weaver"):
        first.apply([(lin(), 0.5)])
    second.apply([])
    assert bits(one) == bits(two) == base


def test_another_layout_of_the_same_memory_is_refused_by_name() -> None:
    one = Net()
    two, base = tied_to(one, "transposed"), bits(one)
    first, second = inweave.Weaver(one), inweave.Weaver(two)
    first.apply([(HEAD, 1.0)])  # not the shared memory
    assert second.apply([(lin(), 0.5)]) == 2
    with pytest.raises(MergeStateError, match=r"lin\.weight: it shares its memory with lin\.weight of another Weaver"):
        first.apply([(lin(), 0.5)])
    second.apply([])
    assert first.apply([]) == 1 and bits(one) == base


@pytest.mark.parametrize("how", ["parameter", "data"])
def test_what_a_deleted_weaver_merged_is_restored_through_the_other_module(how: str) -> None:
    one, base = Net(), bits(Net())
    two = tied_to(one, "parameter")
    inweave.Weaver(one).apply([(lin(), 0.5)])
    if how == "data":
        two.lin.weight = nn.Parameter(one.lin.weight.data)
    else:
        one.lin = nn.Linear(8, 8)  # nothing is left of the model but the parameter
    second = inweave.Weaver(two)
    if how == "data":  # another tensor, of which nobody knows whether it was written meanwhile
        with pytest.raises(MergeStateError, match=r"lin\.weight: modified after .* restore\(\) puts"):
            second.apply([(lin(3), 1.0)])
        second.restore()
    assert second.apply([(lin(3), 1.0)]) == 2
    second.apply([])
    assert bits(two) == base


@pytest.mark.parametrize("adapter", [HEAD, lin()], ids=["another module", "this module"])
def test_a_module_that_is_shared_only_later_is_restored(adapter: inweave.Adapter) -> None:
    one, two = Net(), Net()
    base = bits(one)
    first, second = inweave.Weaver(one), inweave.Weaver(two)
    first.apply([(lin(), 1.0)])
    second.apply([(adapter, 0.5)])
    two.lin = one.lin
    with pytest.raises(MergeStateError, match=r"another Weaver|lin\.weight.*modified outside"):
        second.apply([])
    assert first.apply([]) == 2
    second.apply([])
    assert bits(one) == bits(two) == base


@pytest.mark.parametrize("keep", ["device", "file"])
def test_a_deleted_weaver_leaves_its_originals_to_the_next(keep: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net = Net()
    base, before = state(net), bits(net)
    save_file(base, tmp_path / "base.safetensors")
    sources = FileSource(tmp_path / "base.safetensors")
    inweave.Weaver(net, keep=keep, sources=sources).apply([(lin(), 0.5), (EMB, 1.0)])
    inweave.Weaver(net, keep=keep, sources=sources).apply([(lin(), 0.5)])
    for name, value in merged(base, (lin(), 0.5)).items():
        assert torch.equal(net.state_dict()[name], value), name
    inweave.Weaver(net).apply([])
    assert bits(net) == before


def test_weights_modified_after_a_weaver_was_deleted_are_refused_and_can_be_restored() -> None:
    net = Net()
    before = bits(net)
    inweave.Weaver(net).apply([(lin(), 0.5)])
    with torch.no_grad():
        net.lin.weight.mul_(2)
    weaver, changed = inweave.Weaver(net), bits(net)
    with pytest.raises(MergeStateError, match=r"lin\.weight: modified after a Weaver .* was deleted; restore\(\) puts"):
        weaver.apply([(lin(), 0.5)])
    assert bits(net) == changed
    weaver.restore()
    assert bits(net) == before and weaver.apply([(lin(), 0.5)]) == 2


def test_nothing_outlives_its_weaver_and_its_model() -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(lin(), 0.5)])
    claim = weakref.ref(weaver._claim)
    original = weakref.ref(weaver._writer.pristine["unet"]._saved["lin.weight"])
    alive = weakref.ref(net)
    weaver.apply([])
    gone = weakref.ref(weaver)
    del weaver
    assert gone() is None and original() is None  # the base needs no originals
    inweave.Weaver(net).apply([(lin(), 0.5)])
    assert claim() is None
    del net
    assert alive() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_of_a_woven_model_is_not_taken_for_a_base(copied: Callable[[Any], Any]) -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    free = copied(net)
    weaver.apply([(lin(), 0.5)])
    woven = copied(net)
    weaver.apply([])
    assert bits(free) == bits(net) != bits(woven) and type(woven.lin.__dict__["_inweave_claims"]) is bool
    for work in (lambda: inweave.Weaver(woven).apply([]), lambda: inweave.Weaver(woven).restore()):
        with pytest.raises(MergeStateError, match=r"lin\.\w+: this model was copied while adapters were merged"):
            work()
    fresh = Net()
    fresh.load_state_dict(woven.state_dict())  # the way out that the message names
    assert inweave.Weaver(fresh).apply([(lin(), 0.5)]) == inweave.Weaver(free).apply([(lin(), 0.5)]) == 2


def test_refusals_do_not_collect_garbage_each_time() -> None:
    """A collection takes seconds in a process with many objects, and Weavers that take turns are refused often."""
    net, passes = Net(), list[str]()
    one, two = inweave.Weaver(net), inweave.Weaver(net)
    one.apply([(lin(), 0.5)])
    gc.callbacks.append(lambda phase, info: passes.append(phase))
    try:
        for _ in range(40):
            with pytest.raises(MergeStateError, match="another Weaver"):
                two.apply([(lin(), 0.5)])
    finally:
        gc.callbacks.pop()
    assert 0 < passes.count("start") < 40


def test_weavers_in_threads_never_add_up() -> None:
    net = Net()
    base = state(net)
    weavers = [inweave.Weaver(net) for _ in range(4)]
    allowed = {0.0: base, **{strength: merged(base, (lin(), strength)) for strength in (1.0, 2.0, 3.0, 4.0)}}
    wrong: list[str] = []
    any_applied = threading.Event()

    def work(number: int) -> None:
        adapter = lin()
        for _ in range(40):
            try:
                weavers[number].apply([(adapter, number + 1.0)])
            except MergeStateError as error:
                if "another Weaver" not in str(error):
                    wrong.append(str(error))
                continue
            any_applied.set()
            if not torch.equal(net.lin.weight, allowed[number + 1.0]["lin.weight"]):
                wrong.append(f"weights of {number}")
            weavers[number].apply([])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and any_applied.is_set()
    assert all(torch.equal(net.state_dict()[name], value) for name, value in base.items())


@pytest.mark.parametrize("keep", ["device", "file"])
@pytest.mark.parametrize("through", [(torch.float16,), (torch.bfloat16,), (torch.float16, torch.bfloat16)])
def test_conversions_there_and_back_are_followed(through: Any, keep: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net, plain = Net(), Net()
    base = state(net)
    save_file(base, tmp_path / "base.safetensors")
    weaver = inweave.Weaver(net, keep=keep, sources=FileSource(tmp_path / "base.safetensors"))
    for stack in ([], [(lin(3), 1.0)]):
        weaver.apply([(lin(), 0.5)])
        for dtype in (*through, torch.float32):
            net.to(dtype)
            plain.to(dtype)
        weaver.apply(stack)
        expected = merged(base, *stack) if stack else base
        for name, value in net.state_dict().items():
            original = name.startswith("lin.")  # these are restored from the original bits, not from rounded ones
            assert torch.equal(value, expected[name] if original else plain.state_dict()[name]), name
        weaver.apply([])
