#include "torch_adapter/routing.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <string>
#include <typeinfo>
#include <utility>

#include "base/errors.h"
#include "torch_adapter/versions.h"

namespace vmm {

// One model entered by one thread: a link of its chain.
//
// Leaving in order pops the link. A link that something else lies upon (torch's
// profiler, begun inside the model and still running), or that is left out of
// order, cannot be popped: it is marked dead, skipped from then on, and popped
// as soon as it comes to the top.
class ModelContext final : public c10::DebugInfoBase, public std::enable_shared_from_this<ModelContext> {
 public:
  ModelContext(std::shared_ptr<Pool> pool, ModelContextPtr parent) : pool(std::move(pool)), parent(std::move(parent)) {}

  const std::shared_ptr<Pool> pool;
  const ModelContextPtr parent;  // of whatever device
  // torch's own link that holds this one, only ever compared.
  const c10::ThreadLocalDebugInfo* holder = nullptr;
  std::atomic<bool> left{false};
  std::atomic<bool> dead{false};
};

namespace {

using c10::ThreadLocalDebugInfo;

// The top of this thread's chain, dead or not, or nullptr. Whoever else uses
// the slot (up to torch 2.12 it is one of torch's own tests' two) is ignored.
ModelContext* top() {
  c10::DebugInfoBase* info = ThreadLocalDebugInfo::get(kModelSlot);
  // Comparing types is a comparison of two pointers; dynamic_cast takes 10 ns.
  if (info == nullptr || typeid(*info) != typeid(ModelContext)) return nullptr;
  return static_cast<ModelContext*>(info);
}

const ModelContext* skip_dead(const ModelContext* context) {
  while (context != nullptr && context->dead.load(std::memory_order_relaxed)) context = context->parent.get();
  return context;
}

bool can_pop(const ModelContext& context) { return ThreadLocalDebugInfo::current().get() == context.holder; }

void pop_dead() {
  for (ModelContext* context = top(); context != nullptr && context->dead.load(std::memory_order_relaxed);
       context = top()) {
    if (!can_pop(*context)) return;
    ThreadLocalDebugInfo::_pop(kModelSlot);
  }
}

bool is_in_chain(const ModelContext* link, const ModelContext& context) {
  while (link != nullptr && link != &context) link = link->parent.get();
  return link != nullptr;
}

std::string cure(const std::string& model) {
  return " Where a function is suspended inside a model, decorate it instead (@use_model('" + model +
         "') leaves the model at every yield and await), or enter the model inside each step.";
}

[[noreturn]] void refuse_to_leave(const ModelContext& context, const ModelContext* innermost, bool twice) {
  const std::string& model = context.pool->name();
  if (twice) throw VmmError("model '" + model + "' was entered once and is left a second time.");
  const std::string current = innermost == nullptr ? "no model" : "model '" + innermost->pool->name() + "'";
  if (is_in_chain(top(), context)) {
    throw VmmError("model '" + model + "' is left while " + current +
                   ", entered later, is still open: a `with` was held across a `yield` or an `await` and closed out "
                   "of order, so tensors made meanwhile may lie in the wrong pool. '" +
                   model + "' is left now, and " + current + " stays open." + cure(model));
  }
  throw VmmError("model '" + model + "' is left by a thread that has not entered it; here " + current +
                 " is open. A `with` was held across a `yield` or an `await` and closed elsewhere. '" + model +
                 "' is left now on the thread that entered it." + cure(model));
}

}  // namespace

ModelContextPtr enter_model(std::shared_ptr<Pool> pool) {
  if (pool->is_retired()) throw InvalidArgumentError("pool '" + pool->name() + "' is closed");
  pop_dead();
  ModelContext* below = top();
  auto context =
      std::make_shared<ModelContext>(std::move(pool), below == nullptr ? nullptr : below->shared_from_this());
  ThreadLocalDebugInfo::_push(kModelSlot, context);
  context->holder = ThreadLocalDebugInfo::current().get();
  detail::any_model_entered.store(true, std::memory_order_relaxed);
  return context;
}

void leave_model(const ModelContextPtr& context) {
  const bool twice = context->left.exchange(true, std::memory_order_relaxed);
  const ModelContext* innermost = skip_dead(top());
  const bool in_order = !twice && innermost == context.get();
  // Only out of its turn is a link marked dead: a chain that torch has copied
  // for work still under way keeps its models otherwise.
  if (in_order && top() == context.get() && can_pop(*context)) {
    ThreadLocalDebugInfo::_pop(kModelSlot);
  } else {
    context->dead.store(true, std::memory_order_relaxed);
  }
  pop_dead();
  if (!in_order) refuse_to_leave(*context, innermost, twice);
}

const std::shared_ptr<Pool>& pool_of(const ModelContext& context) { return context.pool; }

const std::shared_ptr<Pool>& detail::innermost_pool(const DeviceRoom& room) {
  for (const ModelContext* context = top(); context != nullptr; context = context->parent.get()) {
    if (context->pool->home() == &room.memory && !context->dead.load(std::memory_order_relaxed)) return context->pool;
  }
  return room.default_pool;
}

}  // namespace vmm
