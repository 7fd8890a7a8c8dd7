// What models of one device need to go to sleep: streams for their copies, in both
// directions, and pinned host memory, which all models under one limit share. It moves
// nothing itself (departure, arrival).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/function_ref.h"
#include "base/sync.h"
#include "core/device/device_memory.h"
#include "core/memory/backup.h"
#include "core/memory/pinned_memory.h"
#include "core/sleep/place.h"

namespace vmm {

class Sleeper {
 public:
  explicit Sleeper(DeviceMemory& memory) : memory_(memory) {}
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // Addresses of blocks that are everybody's, whichever model they were made in: they stay.
  void set_shared_by_all(std::function<std::vector<Address>()> blocks) { shared_by_all_ = std::move(blocks); }
  [[nodiscard]] std::vector<Address> shared_by_all() const {
    return shared_by_all_ == nullptr ? std::vector<Address>() : shared_by_all_();
  }

  // The streams of copies out of, and into, the device's memory; made when first asked for.
  // Throw DriverError.
  StreamUse out() VMM_EXCLUDES(mutex_) { return stream(&out_); }
  StreamUse in() VMM_EXCLUDES(mutex_) { return stream(&in_); }
  // Until all that is queued now is done, copies among it, however they have failed.
  void wait_for_queued_work() noexcept;
  // Of the models whose limit stands under `group`.
  std::shared_ptr<PinnedMemory> host_memory(const Budget& group) VMM_EXCLUDES(mutex_);
  // Gives back what of it no sleeping model uses. Returns the bytes.
  std::size_t release_host_memory(const Budget& group) VMM_EXCLUDES(mutex_);
  // PinnedMemory::set_limit(), where what awake models keep there in case they sleep again
  // unchanged goes as well, if it has to.
  std::size_t set_host_limit(const Budget& group, std::size_t bytes) VMM_EXCLUDES(mutex_);
  // For a request of `bytes` of the host's memory that it has not: of all groups', what no sleeping
  // model uses, or where that is not enough, what awake ones keep in case they sleep again
  // unchanged; nothing where all would not do. Returns the bytes.
  std::size_t release_all_host_memory(std::size_t bytes) VMM_EXCLUDES(mutex_);
  // `group` is closed: none of that stays, what is in use no longer than until it comes back.
  void end_host_memory(const Budget& group) VMM_EXCLUDES(mutex_);
  // The first of `places` with room for the contents, one after the other; nullptr: they are
  // discarded. Nothing changes them any more: where they are to be packed they are looked at.
  // Throws OutOfMemoryError, or what the last of them says, where none has; NotAvailableError
  // where the device cannot pack.
  std::shared_ptr<Backup> make_backup(const Places& places, const std::vector<Content>& contents, Pool& asker);

  // `choose` picks a file's name and notes it, before another thread looks which are taken.
  void name_file(const FunctionRef<void()>& choose) VMM_EXCLUDES(naming_) {
    const MutexLock lock(naming_);
    choose();
  }

  [[nodiscard]] DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] Driver& driver() const { return memory_.driver(); }

 private:
  StreamUse stream(Stream* which) VMM_EXCLUDES(mutex_);
  std::shared_ptr<Backup> make_host_backup(std::size_t bytes, Pool& asker);
  std::shared_ptr<Backup> make_packed_backup(const std::vector<Content>& contents, Pool& asker);
  // Throws OutOfMemoryError where the host has no memory for `bytes` more of it.
  void make_host_room(const PinnedMemory& memory, std::size_t bytes, Pool& asker);
  std::vector<std::shared_ptr<PinnedMemory>> all_host_memory() VMM_EXCLUDES(mutex_);
  std::size_t release_unused_of_others(const PinnedMemory& memory, std::size_t bytes) VMM_EXCLUDES(mutex_);
  bool forget_unchanged(const Budget& group);

  DeviceMemory& memory_;
  std::function<std::vector<Address>()> shared_by_all_;
  Mutex naming_;  // above the registry's and the pools'
  Mutex mutex_;   // above DeviceStreams'
  Stream out_ VMM_GUARDED_BY(mutex_) = nullptr;
  Stream in_ VMM_GUARDED_BY(mutex_) = nullptr;
  struct OfGroup {
    std::weak_ptr<const Budget> group;  // of nobody: the device's own
    std::shared_ptr<PinnedMemory> memory;
  };
  std::map<const Budget*, OfGroup> host_memory_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
