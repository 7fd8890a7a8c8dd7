"""The ends of processes: exit in any order, forks, kills. Each test is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.helpers import ROOT, python, run

SETUP = """
import gc, os, sys, threading
import torch, torch_vmm
torch_vmm.enable(device="cpu")
shared = torch_vmm.SharedMemoryPool("256MiB", device="cpu")
llama = shared.register_model("llama", "1GiB")
qwen = shared.register_model("qwen", "1GiB")
with llama:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.Adam(net.parameters())
    loss = net(torch.randn(4, 64)).sum()
    loss.backward()
    optimizer.step()
with qwen:
    tensor = torch.arange(1 << 20)
pool = torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
pool.allocate(0, "4MiB")
view = pool.tensor(0, 1 << 20)
view.fill_(7)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "del llama, qwen, shared, pool; gc.collect()",
        "del pool; gc.collect(); assert view.sum().item() == 7 << 20",
        "del net, optimizer, loss, tensor, view; gc.collect(); shared.close(); pool.close(force=True)",
        "shared.close(force=True); pool.close(force=True)",
        "shared.close(force=True); del net; gc.collect(); sys.modules['kept'] = tensor",
        "sys.modules.pop('torch_vmm'); del torch_vmm",
        "sys.modules.pop('torch_vmm._C'); del torch_vmm, shared, llama",
        "sys.exit(0)",
        "threading.Thread(target=lambda: torch.ones(10)).start()",
        "import atexit; atexit.register(lambda: print(torch.ones(3).sum().item()))",
        "context = torch_vmm.use_model('llama'); context.__enter__()",
        "timeline = shared.record_timeline(0.0001)",
        "hold = (lambda pool: (yield pool.__enter__()))(llama); next(hold)",
        """
class Last:
    def __del__(self):
        torch.zeros(1000)
        self.tensor = None
last = Last(); last.tensor = torch.ones(1 << 20); last.itself = last
""",
        """
cycle = [torch.ones(1 << 20)]; cycle.append(cycle); cycle.append(shared); del cycle
""",
    ],
)
def test_exits_in_any_order(end: str) -> None:
    run(SETUP + textwrap.dedent(end))


def test_exits_as_a_whole_process() -> None:
    run(SETUP, fresh=True)


@pytest.mark.parametrize("order", range(6))
def test_module_globals_go_in_odd_orders(order: int) -> None:
    names = ["llama", "qwen", "shared", "net", "optimizer", "loss", "tensor", "pool", "view"]
    names = names[order:] + names[:order]
    if order % 2:
        names.reverse()
    run(SETUP + "\n".join(f"del {name}; gc.collect()" for name in names))


def test_tensors_outlive_their_pools_until_exit() -> None:
    out = run(
        SETUP
        + """
import atexit
def late():
    assert tensor[-1].item() == (1 << 20) - 1
    assert all(bool(torch.isfinite(parameter).all()) for parameter in net.parameters())
    print("fine")
atexit.register(late)
shared.close(force=True)
del shared, llama, qwen
"""
    )
    assert out == "fine\n"


def test_os_exit_and_exceptions_keep_their_codes() -> None:
    assert python(SETUP + "os._exit(3)").returncode == 3
    assert python(SETUP + "sys.exit(4)").returncode == 4
    done = python(SETUP + "raise ValueError('as it was')")
    assert done.returncode == 1
    assert "ValueError: as it was" in done.stderr
    assert "Segmentation" not in done.stderr


def test_threads_that_are_in_a_model_at_the_end() -> None:
    # They sleep: a daemon thread inside an operation of torch aborts the process, whatever allocates.
    run(
        SETUP
        + """
import time
ready = threading.Barrier(4)
def work():
    with qwen:
        kept = torch.randn(100, 100) @ torch.randn(100, 100)
        ready.wait()
        time.sleep(1000)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
ready.wait()
"""
    )


@pytest.mark.parametrize(
    "act",
    [
        "mine.allocate(0, '2MiB'); mine.deallocate(0, '2MiB')",
        "mine.stats(); shared.global_stats(); mine.compact()",
        "buffers.alloc(1000).free(); buffers.stats()",
        "torch_vmm.VirtualMemoryPool('4MiB', device='cpu').close()",
        "manager.free_physical(manager.alloc_physical('2MiB'))",
    ],
)
def test_daemon_threads_inside_a_call_at_the_end(act: str) -> None:
    # Python before 3.14 unwinds a thread that wants its lock back. Several, as one may be in Python just then.
    run(
        SETUP
        + f"""
import time
buffers, manager = torch_vmm.MemoryPool("cpu"), torch_vmm.VirtualMemoryManager("cpu")
def work():
    mine = torch_vmm.VirtualMemoryPool("4MiB", device="cpu")
    while True:
        {act}
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
""",
        fresh=True,
    )


# -- Forks -------------------------------------------------------------------------------------------------------------

FORK = """
def in_child(function):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            import traceback; traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_reads_and_writes_its_own_copy() -> None:
    run(
        SETUP
        + FORK
        + """
before = [parameter.clone() for parameter in net.parameters()]
def child():
    assert tensor[-1].item() == (1 << 20) - 1
    tensor.zero_()
    for parameter in net.parameters(): parameter.data.fill_(3)
    view.zero_()
    assert tensor.sum().item() == 0
in_child(child)
assert tensor[-1].item() == (1 << 20) - 1
assert view.sum().item() == 7 << 20
assert all(torch.equal(*pair) for pair in zip(before, net.parameters()))
"""
    )


def test_a_forked_child_makes_and_frees_tensors() -> None:
    run(
        SETUP
        + FORK
        + """
def child():
    fresh = [torch.randn(1000) for _ in range(100)]
    with_grad = torch.ones(10, requires_grad=True)
    (with_grad * 2).sum().backward()
    assert with_grad.grad.tolist() == [2.0] * 10
    global tensor, net, optimizer, loss
    del fresh, tensor, net, optimizer, loss
    gc.collect()
in_child(child)
with llama:
    assert torch.ones(1 << 20).sum().item() == 1 << 20
"""
    )


def test_a_forked_child_is_told_that_pools_are_out_of_reach() -> None:
    run(
        SETUP
        + FORK
        + """
def child():
    for act in (
        lambda: pool.allocate("8MiB", "2MiB"), lambda: pool.stats(), lambda: pool.memory_stats(),
        lambda: shared.global_stats(), lambda: shared.register_model("new"), lambda: llama.empty_cache(),
        lambda: torch_vmm.VirtualMemoryPool("2MiB", device="cpu"), lambda: torch_vmm.enable("cpu"),
        lambda: torch_vmm.pool_of(tensor), lambda: torch_vmm.pool_of(torch.ones(3)), lambda: torch_vmm.sealed(tensor),
        lambda: torch_vmm.alias(tensor), lambda: pool.seal(tensor), lambda: pool.unseal([]),
    ):
        try:
            act()
        except torch_vmm.NotAvailableError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("worked")
    repr(pool), repr(shared), repr(llama), repr(shared.models)
    assert str(shared) == repr(shared)
    global shared_gone
in_child(child)
pool.allocate("8MiB", "2MiB")
"""
    )


def test_a_forked_child_has_what_was_recorded_and_records_no_more() -> None:
    run(
        SETUP
        + FORK
        + """
timeline = shared.record_timeline(0.0001)
def child():
    seen = len(timeline.samples)
    assert seen > 0 and timeline.samples[0].allocated_bytes["qwen"] == tensor.nbytes
    with timeline:
        pass
    timeline.stop()
    assert len(timeline.samples) == seen
    try:
        shared.record_timeline()
    except torch_vmm.NotAvailableError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("worked")
for _ in range(20):  # whatever the thread is doing just then
    in_child(child)
timeline.stop()
assert len(timeline.samples) > 2
"""
    )


def test_a_forked_child_drops_everything_and_exits_as_usual() -> None:
    run(
        SETUP
        + """
sys.stdout.flush()
child = os.fork()
if child == 0:
    del pool, shared, llama, qwen, net, optimizer, loss, tensor, view
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert tensor.sum().item() == ((1 << 20) - 1) * (1 << 19)
"""
    )


def test_a_fork_while_threads_allocate() -> None:
    run(
        SETUP
        + FORK
        + """
stop = threading.Event()
def work():
    with qwen:
        while not stop.is_set():
            torch.ones(5000) + 1
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(10):
    in_child(lambda: torch.ones(1 << 18).sum())
stop.set()
for thread in threads: thread.join()
""",
        timeout=180,
    )


def test_a_data_loader_with_workers() -> None:
    out = run(
        SETUP
        + """
import multiprocessing
multiprocessing.set_start_method("fork")
inputs = torch.arange(64 * 16, dtype=torch.float32).view(64, 16)
data = torch.utils.data.TensorDataset(inputs, torch.arange(64))
total = 0.0
with llama:
    for _ in range(2):
        for batch, labels in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
            total += batch.sum().item()
            assert torch.equal(batch, inputs[labels])
print(total)
"""
    )
    assert float(out) == 2.0 * sum(range(64 * 16))


# -- Kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_killed_leaves_nothing(how: signal.Signals) -> None:
    code = SETUP + textwrap.dedent(
        """
        import faulthandler, signal
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
        print("ready", flush=True)
        try:
            while True:
                with llama:
                    tensors = [torch.randn(100000) for _ in range(10)]
                shared.allocate_for_model("qwen", "2MiB")
                shared.deallocate_for_model("qwen", 0, "2MiB") if False else None
                if qwen.physical_memory_usage > 64 << 20:
                    qwen.close(force=True); qwen = shared.register_model("qwen", "1GiB")
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    before = memory_files()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.send_signal(how)
    try:
        child.wait(timeout=20)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGUSR1)  # says where it is
        child.send_signal(how)  # Python drops an interrupt that arrives in a finaliser
    _, errors = child.communicate(timeout=40)
    assert child.returncode == (130 if how is signal.SIGINT else -how), errors
    assert "Fatal" not in errors
    # torch's carry their maker's number: those of programs beside this one are not the child's.
    made = {name for name in memory_files() - before if not name.startswith("torch_") or f"_{child.pid}_" in name}
    assert made == set()


def memory_files() -> set[str]:
    """Whatever a process could leave behind in shared memory."""
    return set(os.listdir("/dev/shm"))


def test_a_limit_on_file_sizes_is_kept_and_named() -> None:
    """``ulimit -f``: chunks lie in a file, and the kernel would end the process that makes one longer."""
    out = run(
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a C++ program does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, resource.RLIM_INFINITY))
        import torch, torch_vmm
        torch_vmm.enable("cpu")
        within = torch.ones(8 << 20)
        pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu")
        try:
            pool.allocate(0, "256MiB")
        except torch_vmm.OutOfMemoryError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        pool.allocate(0, "256MiB")
        print(within.sum().item() == 8 << 20)
        """
    )
    refusal, *_, intact = out.splitlines()
    assert "the driver refused (ftruncate: EFBIG, since RLIMIT_FSIZE is 67108864 bytes" in refusal
    assert intact == "True"


LEAVE_ADDRESSES = """
import resource
import torch, torch_vmm
def leave(bytes):
    "As ulimit -v: so many bytes of addresses beyond those in use."
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + bytes, resource.RLIM_INFINITY))
"""


def test_pools_that_name_no_capacity_make_do_with_the_addresses_there_are() -> None:
    """``ulimit -v``: four times the device's memory (8 GiB here) does not fit, so it is less."""
    out = run(
        LEAVE_ADDRESSES
        + """
leave(6 << 30)
torch_vmm.enable("cpu")
default = torch_vmm.current_pool("cpu")
print(default.capacity >> 30, torch.ones(1000).sum().item())
leave(4 << 30)
shared = torch_vmm.SharedMemoryPool("64MiB", device="cpu")
print(shared.register_model("a").capacity >> 30)
leave(4 << 30)
try:
    shared.register_model("b", "8GiB")
except torch_vmm.OutOfMemoryError as error:
    print(error)
"""
    )
    first, model, refusal = out.splitlines()
    assert first == "4 1000.0"
    assert model == "2"
    assert refusal.startswith("pool 'b': no 8 GiB of virtual addresses are left")


def test_without_addresses_for_the_default_pool_it_says_so() -> None:
    out = run(
        LEAVE_ADDRESSES
        + """
leave(2 << 30)
for _ in range(2):
    try:
        torch_vmm.enable("cpu")
    except torch_vmm.OutOfMemoryError as error:
        print(error)
print(torch.ones(1000).sum().item(), torch_vmm.is_enabled("cpu"))
leave(12 << 30)
torch_vmm.enable("cpu")
print(torch.ones(1000).sum().item(), torch_vmm.current_pool("cpu").capacity >> 30)
"""
    )
    first, again, before, after = out.splitlines()
    assert first == again
    assert "pool 'default': no 2 GiB of virtual addresses are left" in first
    assert "RLIMIT_AS" in first
    assert before == "1000.0 False"
    assert after == "1000.0 8"


# -- Memory that is not there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "access",
    [
        "read(range_.base)",  # reserved, nothing mapped
        "manager.map(range_, physical); read(range_.base)",  # no access yet
        "manager.map(range_, physical); manager.set_access(range_, torch_vmm.AccessFlags.READ); write(range_.base)",
        "manager.map(range_, physical); manager.set_access(range_, torch_vmm.AccessFlags.READ_WRITE);"
        "write(range_.base); manager.set_access(range_, torch_vmm.AccessFlags.NONE); read(range_.base)",
        "manager.map(range_, physical); manager.set_access(range_, torch_vmm.AccessFlags.READ_WRITE);"
        "write(range_.base); manager.unmap(range_, 0, 2 << 20); read(range_.base)",
        "read(pool.base_address)",
        "pool.allocate(0, 1); write(pool.base_address); pool.deallocate(0, 1); read(pool.base_address)",
        "pool.allocate(0, 1); read(pool.base_address + (2 << 20))",
    ],
)
def test_what_is_not_there_faults(access: str) -> None:
    done = python(
        f"""
import ctypes, torch, torch_vmm
def read(address): return ctypes.string_at(address, 1)
def write(address): ctypes.memset(address, 1, 1)
manager = torch_vmm.VirtualMemoryManager("cpu")
range_, physical = manager.reserve(4 << 20), manager.alloc_physical(2 << 20)
pool = torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
print("before", flush=True)
{access}
print("after", flush=True)
"""
    )
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS), done.stderr
    assert done.stdout == "before\n"


def test_a_read_only_mapping_can_be_read() -> None:
    out = run(
        """
        import ctypes, torch, torch_vmm
        from torch_vmm import AccessFlags
        manager = torch_vmm.VirtualMemoryManager("cpu")
        range_, physical = manager.reserve(4 << 20), manager.alloc_physical(2 << 20)
        manager.map(range_, physical, 0)
        manager.map(range_, physical, 2 << 20)
        manager.set_access(range_, AccessFlags.READ_WRITE, offset=0, size=2 << 20)
        manager.set_access(range_, AccessFlags.READ, offset=2 << 20, size=2 << 20)
        ctypes.memset(range_.base, 65, 3)
        print(ctypes.string_at(range_.base + (2 << 20), 3))
        """
    )
    assert out == "b'AAA'\n"
