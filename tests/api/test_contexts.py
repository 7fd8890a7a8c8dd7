"""Whose memory a tensor is: ``with pool:``, use_model, current_pool; and what cannot be entered."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, rounded, run

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


# -- Contexts ----------------------------------------------------------------------------------------------------------


def test_it_is_enabled(device: str) -> None:
    assert torch_vmm.is_enabled(device)
    torch_vmm.enable(device)  # again is fine
    assert torch_vmm.is_enabled(device)


def test_outside_every_model_is_the_default_pool(device: str, here: Callable[[], str]) -> None:
    assert here() == "default"
    default = torch_vmm.current_pool(device)
    assert default is torch_vmm.current_pool(torch.device(device))
    assert default.model_id is None
    assert torch_vmm.pool_of(torch.empty(10, device=device)) is default


def test_a_tensor_is_in_the_model_it_was_made_in(device: str, llama: Pool) -> None:
    with torch_vmm.use_model(llama) as entered:
        assert entered is llama
        assert torch_vmm.current_pool(device) is llama
        tensor = torch.empty(1000, device=device)
    assert torch_vmm.pool_of(tensor) is llama
    assert llama.base_address <= tensor.data_ptr() < llama.base_address + llama.capacity
    assert llama.memory_allocated() == rounded(4000)
    assert torch_vmm.pool_of(torch.empty(1000, device=device)) is not llama


def test_a_pool_is_a_context_of_its_own(llama: Pool, here: Callable[[], str]) -> None:
    with llama as entered:
        assert entered is llama
        assert here() == "llama"
    assert here() == "default"


def test_a_pool_decorates(llama: Pool, here: Callable[[], str]) -> None:
    @llama
    def within() -> str:
        return here()

    assert within() == "llama"
    assert here() == "default"


def test_ctrl_c_anywhere_leaves_no_model_open(llama: Pool, here: Callable[[], str]) -> None:
    """Signals that come while a thread goes in and out, as fast as it can."""
    ended = threading.Event()
    armed = False
    caught = 0

    def interrupt() -> None:
        while not ended.wait(0.0005):
            signal.raise_signal(signal.SIGINT)

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False  # once, and nowhere but where it is waited for
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, on_interrupt)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            try:
                armed = True
                for each in (llama, torch_vmm.use_model("llama"), llama.tag("weights")):
                    for _ in range(1000):
                        with each:
                            pass
                armed = False
            except KeyboardInterrupt:
                caught += 1
            assert here() == "default", f"after {caught}"
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, former)
    assert caught > 10


def test_a_model_is_found_by_its_id(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    for model_id in ("llama", "qwen"):
        with torch_vmm.use_model(model_id) as entered:
            assert entered.name == here() == model_id


def test_contexts_nest_and_the_inner_one_wins(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    seen = []
    with llama:
        seen.append(here())
        with qwen:
            seen.append(here())
            with llama, llama:
                seen.append(here())
            seen.append(here())
        seen.append(here())
        with torch_vmm.use_model("qwen"):
            seen.append(here())
    seen.append(here())
    assert seen == ["llama", "qwen", "llama", "qwen", "llama", "qwen", "default"]


def test_the_default_pool_can_be_entered_too(device: str, llama: Pool, here: Callable[[], str]) -> None:
    default = torch_vmm.current_pool(device)
    with llama:
        with default:
            assert here() == "default"
        assert here() == "llama"


def test_one_context_can_be_entered_again(llama: Pool, here: Callable[[], str]) -> None:
    context = torch_vmm.use_model("llama")
    for _ in range(2):
        with context:
            with context:
                assert here() == "llama"
            assert here() == "llama"
        assert here() == "default"


def test_an_error_leaves_the_model(llama: Pool, here: Callable[[], str]) -> None:
    with pytest.raises(ZeroDivisionError), llama:
        _ = 1 / 0
    assert here() == "default"


def test_a_free_finds_its_pool_whatever_is_open(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device)
    assert (llama.memory_allocated(), qwen.memory_allocated()) == (MIB, 0)
    with qwen:
        del tensor
        assert (llama.memory_allocated(), qwen.memory_allocated()) == (0, 0)


def test_memory_is_used_again_by_its_own_model_only(device: str, llama: Pool, qwen: Pool) -> None:
    with llama:
        tensor = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
        address = tensor.data_ptr()
        del tensor
    with qwen:
        other = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    with llama:
        again = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    assert again.data_ptr() == address
    assert torch_vmm.pool_of(other) is qwen


def test_the_default_model_is_held(device: str) -> None:
    def set_up() -> None:
        shared = torch_vmm.SharedMemoryPool("64MiB", device=device)
        torch_vmm.set_default_model(shared.register_model("rest"))

    set_up()
    gc.collect()
    try:
        tensor = torch.ones(1000, device=device)
        rest = torch_vmm.pool_of(tensor)
        assert rest is not None
        assert rest.name == "rest"
        del tensor
    finally:
        torch_vmm.reset_default_model(device)
    held = weakref.ref(rest)
    del rest
    gc.collect()
    assert held() is None


def test_the_default_model(device: str, llama: Pool, qwen: Pool) -> None:
    torch_vmm.set_default_model(llama)
    try:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device)
        assert torch_vmm.pool_of(tensor) is llama
        assert torch_vmm.current_pool(device) is llama
        with qwen:
            assert torch_vmm.current_pool(device) is qwen
    finally:
        torch_vmm.reset_default_model(device)
    assert torch_vmm.current_pool(device) is not llama
    del tensor
    with pytest.raises(torch_vmm.InvalidArgumentError, match="give a pool"):
        torch_vmm.set_default_model("llama")  # type: ignore[arg-type]
    torch_vmm.set_default_model(llama)
    llama.close()
    assert torch_vmm.current_pool(device) is not llama, "as long as it is open"


def test_a_model_of_another_device_changes_nothing_here(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs two kinds of device")
    code = """
import torch, torch_vmm
for device in ("cuda", "cpu"):
    torch_vmm.enable(device)
with torch_vmm.VirtualMemoryPool("64MiB", device="cpu") as elsewhere:
    assert torch_vmm.pool_of(torch.empty(10, device="cuda")).name == "default"
    assert torch_vmm.current_pool("cuda").name == "default"
    assert torch_vmm.current_pool("cpu") is elsewhere is torch_vmm.pool_of(torch.empty(10))
print("done")
"""
    assert run(code) == "done\n"


# -- What cannot be entered --------------------------------------------------------------------------------------------


def test_an_id_that_nobody_has(llama: Pool, qwen: Pool, here: Callable[[], str]) -> None:
    with pytest.raises(torch_vmm.ModelNotFoundError) as raised, torch_vmm.use_model("mistral"):
        pass
    assert raised.value.model_id == "mistral"
    assert "llama" in str(raised.value)
    assert "qwen" in str(raised.value)
    assert here() == "default"


def test_an_id_that_two_have(roomy: Shared, llama: Pool, make_shared: Callable[..., Shared]) -> None:
    make_shared().register_model("llama", "64MiB")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="2 SharedMemoryPools") as raised:
        with torch_vmm.use_model("llama"):
            pass
    assert str(roomy.device) in str(raised.value)
    with torch_vmm.use_model(llama):
        pass


def test_an_id_on_another_device(device: str, llama: Pool) -> None:
    with torch_vmm.use_model("llama", device=device) as entered:
        assert entered is llama
    with pytest.raises(torch_vmm.ModelNotFoundError, match="cuda:7"), torch_vmm.use_model("llama", device="cuda:7"):
        pass
    with pytest.raises(torch_vmm.InvalidArgumentError, match="cuda:7"):
        torch_vmm.use_model(llama, device="cuda:7")


@pytest.mark.parametrize("model", [None, 3, b"llama", torch_vmm.SharedMemoryPool])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.use_model(model)  # type: ignore[arg-type]


def test_a_shared_pool_is_no_model(roomy: Shared) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="SharedMemoryPool"):
        torch_vmm.use_model(roomy)  # type: ignore[arg-type]


def test_a_model_that_was_unregistered(roomy: Shared, llama: Pool) -> None:
    context = torch_vmm.use_model("llama")
    roomy.unregister_model("llama")
    with pytest.raises(torch_vmm.ModelNotFoundError), context:
        pass
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"), llama:
        pass


# -- Whose stay it is --------------------------------------------------------------------------------------------------


def test_what_was_entered_by_an_object_that_nobody_holds_is_left_by_another(
    roomy: Shared, here: Callable[[], str]
) -> None:
    roomy.register_model("passing", "64MiB")
    roomy["passing"].__enter__()
    gc.collect()
    assert here() == "passing"
    roomy["passing"].__exit__(None, None, None)
    assert here() == "default"


def test_whoever_leaves_what_he_never_entered_puts_nobody_out(llama: Pool, here: Callable[[], str]) -> None:
    inside, done = threading.Barrier(3), threading.Event()
    found: list[str] = []

    def work() -> None:
        with llama:
            inside.wait()
            done.wait()
            found.append(here())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    try:
        with pytest.raises(torch_vmm.VmmError, match="more often than it was entered"):
            llama.__exit__(None, None, None)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert found == ["llama"] * 2
