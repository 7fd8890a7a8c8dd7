"""strict(): tensors that are made outside every model raise, or warn."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm

Pool = torch_vmm.VirtualMemoryPool
Here = Callable[[], str]


@pytest.fixture(autouse=True)
def _off_again(device: str) -> Iterator[None]:
    yield
    torch_vmm.strict(device, "off")


def make(device: str) -> torch.Tensor:
    return torch.empty(1000, device=device)


def test_outside_every_model_is_an_error_that_says_what_to_do(device: str, llama: Pool) -> None:
    with torch_vmm.strict(device):
        with pytest.raises(RuntimeError, match=r"strict\(\): a tensor of 3.9 KiB on \w+(:0)? would be made") as raised:
            make(device)
        for cure in ("with pool:", "use_model", "carry"):
            assert cure in str(raised.value)
        with llama:
            assert torch_vmm.pool_of(make(device)) is llama
    make(device)


@pytest.mark.parametrize("name", ["elastic", "sparse", "aligned", "placed", "cache", "alias"])
def test_memory_of_pages_is_a_models_too(device: str, llama: Pool, name: str) -> None:
    with llama:
        shown = torch_vmm.aligned((1 << 19,), device=device)

    def make_pages() -> object:
        if name == "alias":
            return torch_vmm.alias(shown)
        if name == "placed":
            return torch_vmm.aligned((1 << 20,), placement=[(device, 1 << 19), (device, 1 << 19)])
        if name == "cache":
            return torch_vmm.ElasticKVCache(8).update(*[torch.ones(1, 1, 1, 4, device=device)] * 2, 0)
        return getattr(torch_vmm, name)((3, 4), device=device)

    with torch_vmm.strict(device, "warn"), pytest.warns(UserWarning, match="outside every model"):
        make_pages()
    with torch_vmm.strict(device):
        of_torch = name == "cache"  # its states are made first
        with pytest.raises(
            RuntimeError if of_torch else torch_vmm.VmmError,
            match=r"strict\(\): a tensor of .* would be made outside every model",
        ):
            make_pages()
        with llama:
            make_pages()


def test_an_error_leaves_nothing_behind(device: str, llama: Pool) -> None:
    default = torch_vmm.current_pool(device)
    before = default.memory_stats()
    with torch_vmm.strict(device), pytest.raises(RuntimeError):
        make(device)
    after = default.memory_stats()
    assert {key: value for key, value in after.items() if before[key] != value} == {}


def test_the_default_pool_counts_once_it_is_entered(device: str) -> None:
    default = torch_vmm.current_pool(device)
    with torch_vmm.strict(device), default:
        assert torch_vmm.pool_of(make(device)) is default


def test_frees_and_views_need_no_model(device: str, llama: Pool) -> None:
    with llama:
        tensor = make(device)
    with torch_vmm.strict(device):
        view = tensor.view(10, 100)[3:]
        del tensor, view
        gc.collect()


def test_threads_start_outside_every_model(device: str, llama: Pool) -> None:
    errors: list[str] = []

    def work() -> None:
        try:
            make(device)
        except RuntimeError as error:
            errors.append(str(error))

    with torch_vmm.strict(device), llama:
        for function in (work, torch_vmm.carry(work)):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
    assert len(errors) == 1


def test_backward_is_in_the_model_of_its_caller(device: str, llama: Pool) -> None:
    with torch_vmm.strict(device), llama:
        value = torch.ones(100, device=device, requires_grad=True)
        value.square().sum().backward()
    with llama:
        loss = torch.ones(100, device=device, requires_grad=True).square().sum()
    with torch_vmm.strict(device), pytest.raises(RuntimeError, match="strict"):
        loss.backward()


def test_a_function_carried_from_outside_is_outside(device: str, llama: Pool) -> None:
    work = torch_vmm.carry(lambda: make(device))
    with torch_vmm.strict(device), llama, pytest.raises(RuntimeError, match="strict"):
        work()


# -- On and off --------------------------------------------------------------------------------------------------------


def strictness(device: str) -> str:
    """``"raise"``, ``"warn"`` or ``"off"``, as found."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(device)
        except RuntimeError:
            return "raise"
    return "warn" if caught else "off"


def test_as_a_function_it_stays(device: str) -> None:
    seen = [strictness(device)]
    for action in ("raise", "warn", "off", "raise"):
        torch_vmm.strict(device, action)
        gc.collect()
        seen.append(strictness(device))
    assert seen == ["off", "raise", "warn", "off", "raise"]


def test_as_a_context_it_ends(device: str) -> None:
    seen = []
    with torch_vmm.strict(device):
        seen.append(strictness(device))
        with torch_vmm.strict(device, "off"):
            seen.append(strictness(device))
            with torch_vmm.strict(device, action="warn"):
                seen.append(strictness(device))
        seen.append(strictness(device))
    assert [*seen, strictness(device)] == ["raise", "off", "warn", "raise", "off"]


def test_a_context_gives_back_what_a_function_set(device: str) -> None:
    torch_vmm.strict(device, "warn")
    with torch_vmm.strict(device, "raise"):
        assert strictness(device) == "raise"
        torch_vmm.strict(device, "off")  # the latest counts
        assert strictness(device) == "off"
    assert strictness(device) == "off"


def test_one_object_can_be_entered_again(device: str) -> None:
    guard = torch_vmm.strict(device)
    with guard:
        with guard:
            assert strictness(device) == "raise"
        assert strictness(device) == "raise"
    assert strictness(device) == "off"
    with guard:
        assert strictness(device) == "raise"
    assert strictness(device) == "off"


def test_contexts_may_end_in_any_order(device: str) -> None:
    first, second = torch_vmm.strict(device, "raise"), torch_vmm.strict(device, "warn")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert strictness(device) == "warn"
    second.__exit__(None, None, None)
    assert strictness(device) == "off"


@pytest.mark.parametrize("action", ["", "error", None, True, 3])
def test_actions_that_are_none(device: str, action: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="action"):
        torch_vmm.strict(device, action)  # type: ignore[arg-type]
    assert strictness(device) == "off"


def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="device"):
        torch_vmm.strict("meta")
    with pytest.raises(torch_vmm.NotAvailableError, match=f"{device}:99"):
        torch_vmm.strict(f"{device}:99")


# -- Warnings ----------------------------------------------------------------------------------------------------------


def test_each_place_warns_once(device: str, llama: Pool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with torch_vmm.strict(device, "warn"):
            for size in range(1, 6):
                torch.empty(size, device=device)
                torch.zeros(size * 1000, device=device)
                with llama:
                    torch.empty(size, device=device)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
    assert len({warning.lineno for warning in caught}) == 2
    for warning in caught:
        assert warning.category is UserWarning
        assert "made outside every model" in str(warning.message)


def test_a_warning_that_is_an_error_comes_out_of_the_operation(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch_vmm.strict(device, "warn"), pytest.raises(UserWarning, match="outside every model"):
            make(device)


def test_warnings_of_threads_come_out_on_them(device: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch_vmm.strict(device, "warn"):
            threads = [threading.Thread(target=make, args=(device,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert len(caught) == 4


# -- A default model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["strict", "default model"])
def test_a_default_model_does_not_switch_it_off(device: str, make_pool: Callable[..., Pool], first: str) -> None:
    rest = make_pool(name="rest")
    own = torch_vmm.current_pool(device)
    try:
        if first == "default model":
            torch_vmm.set_default_model(rest)
        with torch_vmm.strict(device):
            if first == "strict":
                torch_vmm.set_default_model(rest)
            with pytest.raises(RuntimeError, match="outside every model"):
                torch.empty(1000, device=device)
            with rest:
                torch.empty(1000, device=device)
            torch_vmm.strict(device, "off")  # the latest is in force
            assert torch_vmm.current_pool(device) is rest
            with torch_vmm.strict(device, "warn"):
                with pytest.warns(UserWarning, match="outside every model"):
                    made = torch.empty(1000, device=device)
                assert torch_vmm.pool_of(made) is own
        assert torch_vmm.pool_of(torch.empty(1000, device=device)) is rest
        with torch_vmm.strict(device):
            torch_vmm.reset_default_model(device)
        assert torch_vmm.current_pool(device) is own
    finally:
        torch_vmm.reset_default_model(device)


def test_a_default_model_that_is_closed_meanwhile_is_none(device: str, make_pool: Callable[..., Pool]) -> None:
    rest, own = make_pool(name="rest"), torch_vmm.current_pool(device)
    torch_vmm.set_default_model(rest)
    try:
        with torch_vmm.strict(device):
            rest.close()
        assert torch_vmm.current_pool(device) is own
    finally:
        torch_vmm.reset_default_model(device)
