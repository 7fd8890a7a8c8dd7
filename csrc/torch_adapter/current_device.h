// Which device is the calling thread's, for less than torch's own question takes.
//
// c10::cuda::current_device() asks the runtime: a pair of 117 ns takes 70 to 80 without that (two
// H200s), and each of eight threads that have no context, which wait for one another there, 12 us. The driver
// tells which context is current in 8 to 10 ns, and waits for nobody; each device has one of its own,
// so as long as it is the one that torch was asked about last, torch would say the same. A thread
// that has none has set no device.
//
// But for one case: torch remembers a device that has no context yet as the current one, instead of
// making it one, where a guard ends that began there (c10::cuda::MaybeSetDevice). Another device's
// context, or none, stays current then. To a guard such a device was current without anybody having
// set it (setting makes the context), so it is the first, which is everybody's to begin with: once
// that has a context, which we keep, it is not remembered any more, and what a thread remembered
// before is seen when it asks torch for the first time after that. Whoever calls
// torch.cuda._maybe_exchange_device(1) himself, while nothing has used GPU 1, is not seen
// (docs/torch.md): to be, each allocation would ask as long as any GPU of the machine is unused.
#pragma once

#include <c10/core/Device.h>

#include "driver/driver.h"

namespace vmm {

// A device of this driver is used: its contexts may be asked for from now on.
void know_contexts_of(const Driver& driver);

// As c10::cuda::current_device() says.
c10::DeviceIndex current_cuda_device();

}  // namespace vmm
