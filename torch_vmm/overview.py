"""What all models of a device hold, as one text."""

from __future__ import annotations

from torch_vmm import _C, pools, shared_pools, tables
from torch_vmm.devices import Device, to_device


def report(device: Device = "cuda") -> str:
    """A table of a device's models: what each holds, its limit, floor and
    priority.

    First come those that stand directly under the device's limit, the default
    pool among them, then those of each SharedMemoryPool below its own limit's
    line; ``str()`` of a SharedMemoryPool has these alone. At the end stand the
    totals, the device's limit, what is no model's (it rests in the store, was
    made by hand, or is what sparse tensors show as zero), what is left of
    floors, and what the driver has free.

    ``state`` is ``awake``, ``asleep`` (some of it, at least) or ``closed``: of a
    closed one tensors live on. ``physical`` is the sum of the four columns
    before it. What sleeps is in none of the columns: where something does, a
    line below the totals tells whose it is, how much, and where. Walks the
    pools.

    Raises:
        InvalidArgumentError: no device.
        NotAvailableError: no driver, or no such device.
    """
    key = to_device(device)
    memory = _C.device(*key)
    everything = memory.pools()  # first: what is registered meanwhile is a shared pool's only
    shares = [shared for shared in shared_pools.open_pools() if shared._device == key]
    models = [(shared, shared._handles()) for shared in shares]
    # The handles are held here, so that a key is of one pool.
    keys = {handle.key for _, handles in models for handle in handles}
    alone = [shared_pools.wrap(handle) for handle in everything if handle.key not in keys]
    parts = [
        tables.part_of(shared, [pools.wrap(handle, shared, handle.name) for handle in handles])
        for shared, handles in models
    ]
    return tables.of_device(memory, f"{key}, {memory.name}", tables.rows_of(alone), parts)
