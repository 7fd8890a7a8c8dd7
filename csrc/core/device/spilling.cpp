// DeviceMemory: memory of a model in the host's, for tensors that find none on the device
// (PoolKind::spill). A part of the model like any, but for where its chunks are and who
// pays: a budget of its own, beside the device's. So what is free in it serves nobody on the
// device, and is no victim of the ladder's.
#include <algorithm>

#include "base/errors.h"
#include "core/device/device_memory.h"

namespace vmm {

void DeviceMemory::require_can_spill(const std::string& name) const {
  if (capabilities_.host_located) return;
  throw NotAvailableError("device " + capabilities_.name + " cannot use chunks in host memory, where pool '" + name +
                          "' is to spill");
}

void DeviceMemory::set_spills(Pool& model, bool spills) {
  model.require_open();
  if (spills) require_can_spill(model.name());
  model.set_spills(spills);
}

std::shared_ptr<Budget> DeviceMemory::spill_group_of(const Budget& group) {
  const MutexLock lock(registry_mutex_);
  const auto found = groups_.find(&group);
  if (found != groups_.end()) return found->second.spill;
  return {std::shared_ptr<Budget>(), &spill_budget_};
}

std::shared_ptr<Pool> DeviceMemory::spill_space(Pool& asker) {
  const MutexLock lock(tags_mutex_);
  asker.model().require_open();
  asker.require_taking();  // it may have gone to sleep while the request climbed
  for (const auto& member : family(asker)) {
    if (member->is_spill() && member->tag() == asker.tag()) return member;
  }
  PoolSpec spec = part_spec(asker.shared_from_this(), "host");
  spec.kind = PoolKind::spill;
  spec.capacity = std::min(capabilities_.total_memory, asker.capacity());
  return register_pool_of_at_most(spec, *spill_group_of(asker.group()));
}

Address DeviceMemory::allocate_spilled(Pool& asker, std::size_t bytes, Stream stream) {
  const std::shared_ptr<Pool> space = spill_space(asker);
  Shortage shortage;
  const auto attempt = [&] {
    shortage = {};
    return space->try_allocate(bytes, stream, nullptr, &shortage);
  };
  if (const Address address = attempt()) return address;
  // What rests there in other sizes; then what is idle in other models' spaces, as much as is
  // lacking: under the same bound, or wherever it is where no bound refused but the host.
  const bool is_hosts = shortage.refused == nullptr && !shortage.no_address_space;
  const auto trim = [&] { return is_hosts ? spill_store_.trim_all() : spill_store_.trim(space->group(), 0); };
  if (trim() != 0) {
    if (const Address address = attempt()) return address;
  }
  std::size_t lacking = bytes;
  for (const auto& pool : is_hosts ? pools() : pools_under(space->group())) {
    const std::size_t idle = lacking == 0 || pool == space || !pool->is_spill() ? 0 : pool->idle_bytes();
    if (idle != 0) lacking -= std::min(lacking, pool->shed(idle - std::min(idle, lacking)));
  }
  if (lacking != bytes || space->shed(0) != 0) {
    if (is_hosts) spill_store_.trim_all();  // what they gave rests on their own shelves
    if (const Address address = attempt()) return address;
    space->shed(0);
  }
  // What models asleep in the host's memory have left pinned there, which is slow to pin anew.
  const auto is_hosts_still = [&] {
    const bool is_memory = shortage.status.ok() || shortage.status.code() == StatusCode::out_of_memory;
    return is_memory && shortage.refused == nullptr && !shortage.no_address_space;
  };
  while (is_hosts_still() && host_reserve_ && host_reserve_(bytes) != 0) {
    if (const Address address = attempt()) return address;
  }
  if ((is_hosts ? spill_store_.all_shelved_bytes() : spill_store_.shelved_bytes(space->group())) == 0) return 0;
  // What is there is mapped at former addresses until queued work is done with them; nobody else is
  // asked after this.
  wait_for(clock_.now());
  settle(/*wait=*/false);
  return trim() == 0 ? 0 : attempt();
}

}  // namespace vmm
