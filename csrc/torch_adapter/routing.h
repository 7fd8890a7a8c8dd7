// Whose memory a new tensor is: the chain of models that a thread has entered,
// innermost last. It knows pools by name and home only, and allocates nothing.
//
// The chain hangs in c10::ThreadLocalDebugInfo, which torch copies to whatever
// thread works on this one's behalf: autograd's workers in backward(), forked
// tasks. A plain thread_local would be empty there. How it shares that with
// torch's profiler is debug_info_chain's business.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/pool/pool.h"
#include "process/runtime.h"

namespace vmm {

class ModelContext;
using ModelContextPtr = std::shared_ptr<ModelContext>;

// Enters the model, or a tag of it (DeviceMemory::tagged): tensors that this thread
// makes on the pool's device belong to it until leave_model(). Throws InvalidArgumentError when it is closed.
ModelContextPtr enter_model(std::shared_ptr<Pool> pool);

// The pools that tensors made here come from, the innermost model of each
// device: what enter_carried() takes elsewhere.
std::vector<std::shared_ptr<Pool>> open_models();

// All that this thread has open on the device, innermost first.
std::vector<std::shared_ptr<Pool>> open_on(const DeviceRoom& room);

// Enters exactly these, whatever this thread has open: a device that none of
// them is on is outside every model. Throws as enter_model().
ModelContextPtr enter_carried(std::vector<std::shared_ptr<Pool>> pools);

// Leaves it. VmmError, naming both models and the cure, when it is not the
// innermost one of this thread or was left already: a `with` held across a
// `yield` or an `await`, or closed on another thread. It is left all the same,
// and every other context stays as it was.
void leave_model(const ModelContextPtr& context);

// How often this thread has entered the pool. Throws VmmError where it is entered on another thread,
// which is about to make tensors there.
int require_left_by_others(const Pool& pool);

// Is a model of this device open here? Its default pool counts, where it was
// entered; so does a model that was named for what is made outside all.
bool is_in_model(const DeviceRoom& room);

namespace detail {
// Set when the first model of the process is entered: programs with no models
// skip the look at the thread's chain (11 ns).
inline std::atomic<bool> any_model_entered{false};
const std::shared_ptr<Pool>& innermost_pool(const DeviceRoom& room);
}  // namespace detail

// The pool that an allocation on this device, here and now, comes from; where a tag is
// open, its space.
inline const std::shared_ptr<Pool>& current_pool(const DeviceRoom& room) {
  if (!detail::any_model_entered.load(std::memory_order_relaxed)) return room.outside();
  return detail::innermost_pool(room);
}

}  // namespace vmm
