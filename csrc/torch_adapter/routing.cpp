#include "torch_adapter/routing.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <typeinfo>
#include <utility>

#include "base/errors.h"
#include "torch_adapter/debug_info_chain.h"
#include "torch_adapter/enabled.h"
#include "torch_adapter/torch_kinds.h"
#include "torch_adapter/versions.h"

namespace vmm {

// One model entered by one thread: a link of its chain, the innermost of which
// the thread's debug information holds.
//
// Leaving in order takes the innermost off. One that is left out of order is
// marked dead, skipped from then on, and taken off as soon as it is innermost.
class ModelContext final : public c10::DebugInfoBase, public std::enable_shared_from_this<ModelContext> {
 public:
  ModelContext(std::shared_ptr<Pool> model, ModelContextPtr parent)
      : pool(std::move(model)), home(pool->home()), parent(std::move(parent)) {
    pool->note_entered();
  }
  ModelContext(std::vector<std::shared_ptr<Pool>> carried, ModelContextPtr parent)
      : parent(std::move(parent)), carried(std::move(carried)) {
    for (const auto& each : this->carried) each->note_entered();
  }
  ModelContext(const ModelContext&) = delete;
  ModelContext& operator=(const ModelContext&) = delete;
  ~ModelContext() override { no_more_entered(); }
  // False: it was left before.
  bool leave() {
    if (left.exchange(true, std::memory_order_relaxed)) return false;
    no_more_entered();
    return true;
  }
  // Nor is it by a thread that has ended, whoever holds it still and may leave it.
  void no_more_entered() {
    if (!is_entered.exchange(false, std::memory_order_relaxed)) return;
    if (pool != nullptr) pool->note_left();
    for (const auto& each : carried) each->note_left();
  }

  // What it is called in messages.
  [[nodiscard]] std::string name() const {
    if (pool != nullptr) return name_of(*pool);
    return carried.empty() ? "a carried function" : "a carried function of " + name_of(*carried.front());
  }
  static std::string name_of(const Pool& pool) {
    const std::string model = "model '" + pool.model().name() + "'";
    return pool.tag().empty() ? model : "tag '" + pool.tag() + "' of " + model;
  }

  const std::shared_ptr<Pool> pool;  // nullptr: a carried function's stay
  // The pool's: of a thousand models in turn none has to be looked at.
  const DeviceMemory* const home = nullptr;
  const ModelContextPtr parent;  // of whatever device
  // Of a carried function, which sees these and nothing beneath: one a device.
  const std::vector<std::shared_ptr<Pool>> carried;
  std::atomic<bool> left{false};
  std::atomic<bool> is_entered{true};
  std::atomic<bool> dead{false};
};

namespace {

using c10::ThreadLocalDebugInfo;

// Whoever else uses the slot (up to torch 2.12 it is one of torch's own tests'
// two) is ignored. Comparing types is a comparison of two pointers; dynamic_cast
// takes 10 ns.
bool is_ours(const c10::DebugInfoBase& info) { return typeid(info) == typeid(ModelContext); }

// The innermost of this thread's chain, dead or not, or nullptr.
inline ModelContext* top() {
  c10::DebugInfoBase* info = ThreadLocalDebugInfo::get(kModelSlot);
  return info == nullptr || !is_ours(*info) ? nullptr : static_cast<ModelContext*>(info);
}

const ModelContext* skip_dead(const ModelContext* context) {
  while (context != nullptr && context->dead.load(std::memory_order_relaxed)) context = context->parent.get();
  return context;
}

// What this thread has open, innermost first.
template <typename Visit>
void for_each_open(const Visit& visit) {
  for (const ModelContext* context = skip_dead(top()); context != nullptr; context = skip_dead(context->parent.get())) {
    if (context->pool != nullptr) {
      visit(context->pool);
      continue;
    }
    for (const auto& pool : context->carried) visit(pool);
    return;
  }
}

// `context` is the innermost of this thread from now on.
void set_top(ModelContextPtr context) { set_debug_info_beneath(kModelSlot, std::move(context), &is_ours); }

void take_off_dead() {
  ModelContext* const innermost = top();
  if (innermost == nullptr || !innermost->dead.load(std::memory_order_relaxed)) return;
  ModelContextPtr alive = innermost->parent;
  while (alive != nullptr && alive->dead.load(std::memory_order_relaxed)) alive = alive->parent;
  set_top(std::move(alive));
}

bool is_in_chain(const ModelContext* link, const ModelContext& context) {
  while (link != nullptr && link != &context) link = link->parent.get();
  return link != nullptr;
}

constexpr std::chrono::milliseconds kThreadsEnd{20};

constexpr const char* kCure =
    " Where a function is suspended inside a model, decorate it instead (@use_model(...), or @pool.tag(...) for a tag, "
    "leaves the model at every yield and await), or enter the model inside each step.";

[[noreturn]] void refuse_to_leave(const ModelContext& context, const ModelContext* innermost, bool twice) {
  const std::string model = context.name();
  if (twice) throw VmmError(model + " was entered once and is left a second time.");
  const std::string current = innermost == nullptr ? "no model" : innermost->name();
  if (is_in_chain(top(), context)) {
    throw VmmError(model + " is left while " + current +
                   ", entered later, is still open: a `with` was held across a `yield` or an `await` and closed out "
                   "of order, so tensors made meanwhile may lie in the wrong pool. " +
                   model + " is left now, and " + current + " stays open." + kCure);
  }
  throw VmmError(model + " is left by a thread that has not entered it; here " + current +
                 " is open. A `with` was held across a `yield` or an `await` and closed elsewhere. " + model +
                 " is left now on the thread that entered it." + kCure);
}

// A model may be entered: it is open, and tensors of its device are ours to
// make. Else the `with` would silently do nothing.
void require_usable(const Pool& pool) {
  Runtime::require_own_process();
  pool.require_open();
  const DeviceRoom& room = Runtime::room_of(pool);
  if (may_allocate(room.kind)) return;
  const TorchKind& torch = torch_kind(room.kind);
  throw NotEnabledError(ModelContext::name_of(pool) + " would hold no tensor: torch_vmm is not torch's allocator on " +
                        to_string(room.kind) + ". Call " + torch.enable + torch.enable_when + ".");
}

// What this thread has entered and not left: when it ends it is in none of them.
class EnteredHere {
 public:
  EnteredHere() = default;
  EnteredHere(const EnteredHere&) = delete;
  EnteredHere& operator=(const EnteredHere&) = delete;
  ~EnteredHere() {
    for (const auto& each : contexts_) {
      if (const ModelContextPtr context = each.lock(); context != nullptr) context->no_more_entered();
    }
  }
  void add(const ModelContextPtr& context) {
    while (!contexts_.empty() && has_gone(contexts_.back())) contexts_.pop_back();
    contexts_.push_back(context);
  }

 private:
  static bool has_gone(const std::weak_ptr<ModelContext>& each) {
    const ModelContextPtr context = each.lock();
    return context == nullptr || !context->is_entered.load(std::memory_order_relaxed);
  }
  std::vector<std::weak_ptr<ModelContext>> contexts_;
};
thread_local EnteredHere entered_here;

ModelContextPtr enter(ModelContextPtr context) {
  entered_here.add(context);
  set_top(context);
  detail::any_model_entered.store(true, std::memory_order_relaxed);
  return context;
}

ModelContextPtr link_below() {
  take_off_dead();
  ModelContext* below = top();
  return below == nullptr ? nullptr : below->shared_from_this();
}

// The pool that this chain names on the device, or nullptr.
[[gnu::always_inline]] inline const std::shared_ptr<Pool>* find_pool(const DeviceRoom& room) {
  for (const ModelContext* context = top(); context != nullptr; context = context->parent.get()) {
    if (context->dead.load(std::memory_order_relaxed)) continue;
    if (context->pool != nullptr) {
      if (context->home == &room.memory) return &context->pool;
      continue;
    }
    for (const auto& pool : context->carried) {
      if (pool->home() == &room.memory) return &pool;
    }
    return nullptr;
  }
  return nullptr;
}

}  // namespace

ModelContextPtr enter_model(std::shared_ptr<Pool> pool) {
  require_usable(*pool);
  auto below = link_below();
  return enter(std::make_shared<ModelContext>(std::move(pool), std::move(below)));
}

ModelContextPtr enter_carried(std::vector<std::shared_ptr<Pool>> pools) {
  for (const auto& pool : pools) require_usable(*pool);
  auto below = link_below();
  return enter(std::make_shared<ModelContext>(std::move(pools), std::move(below)));
}

std::vector<std::shared_ptr<Pool>> open_models() {
  std::vector<std::shared_ptr<Pool>> found;
  for_each_open([&found](const std::shared_ptr<Pool>& pool) {
    const bool hidden =
        std::any_of(found.begin(), found.end(), [&](const auto& inner) { return inner->home() == pool->home(); });
    if (!hidden) found.push_back(pool);
  });
  return found;
}

std::vector<std::shared_ptr<Pool>> open_on(const DeviceRoom& room) {
  std::vector<std::shared_ptr<Pool>> found;
  for_each_open([&](const std::shared_ptr<Pool>& pool) {
    if (pool->home() == &room.memory) found.push_back(pool);
  });
  return found;
}

void leave_model(const ModelContextPtr& context) {
  const bool twice = !context->leave();
  const ModelContext* innermost = skip_dead(top());
  const bool in_order = !twice && innermost == context.get();
  // Only out of its turn is a link marked dead: a chain that torch has copied
  // for work still under way keeps its models otherwise.
  if (in_order && top() == context.get()) {
    set_top(context->parent);
  } else {
    context->dead.store(true, std::memory_order_relaxed);
  }
  take_off_dead();
  if (!in_order) refuse_to_leave(*context, innermost, twice);
}

int require_left_by_others(const Pool& pool) {
  int here = 0;
  for (const ModelContext* context = top(); context != nullptr; context = context->parent.get()) {
    if (!context->is_entered.load(std::memory_order_relaxed)) continue;
    const auto is_it = [&pool](const auto& each) { return each.get() == &pool; };
    if (is_it(context->pool) || std::any_of(context->carried.begin(), context->carried.end(), is_it)) ++here;
  }
  // Python's join() of a thread returns a moment before the thread has ended, and with it what it was in.
  const auto until = std::chrono::steady_clock::now() + kThreadsEnd;
  int beside = pool.times_entered() - here;
  while (beside > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    beside = pool.times_entered() - here;
  }
  if (beside <= 0) return here;
  throw VmmError(ModelContext::name_of(pool) + " cannot go to sleep: it is entered (a `with`, or a function that is " +
                 "decorated) on another thread, " + format_count(static_cast<std::size_t>(beside), "time") +
                 "; leave it there first, or enter it for each piece of work");
}

bool is_in_model(const DeviceRoom& room) {
  if (room.outside() != room.default_pool) return true;
  return detail::any_model_entered.load(std::memory_order_relaxed) && find_pool(room) != nullptr;
}

const std::shared_ptr<Pool>& detail::innermost_pool(const DeviceRoom& room) {
  const std::shared_ptr<Pool>* found = find_pool(room);
  return found == nullptr ? room.outside() : *found;
}

}  // namespace vmm
