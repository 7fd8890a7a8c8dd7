// Pool: while its memory is elsewhere. What that is, and how it leaves and comes back, is
// SleepingMemory's (sleeping_memory.h); here is what it is to the rest of the pool: which
// requests are refused, and how slabs are counted. Whoever moves contents, and waits for what is
// queued, is core/sleep.
#include "core/pool/asleep.h"

#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

SleepBegun Pool::begin_sleep(int times_entered_here) {
  const StillLock lock(*this, BlockCaches::Kept::gone);
  if (!space_.is_open() || kind_.is_spill()) return SleepBegun::never;  // it holds none of the device's memory
  if (sleeping_.is_asleep()) {
    begin_transfer_locked(/*is_going=*/true);
    return SleepBegun::again;
  }
  if (context_.log != nullptr) {
    throw NotAvailableError("pool '" + name_ + "' cannot sleep in debug mode, which watches what its memory holds; " +
                            "unset TORCH_VMM_DEBUG");
  }
  // Under this lock: who has come in and had a request met is seen, and whoever comes in later has
  // none met.
  if (times_entered() > times_entered_here) return SleepBegun::entered;
  sleeping_.begin();
  is_cached_.store(false, std::memory_order_relaxed);
  if (!is_closed()) life_.store(Life::asleep, std::memory_order_release);
  count_slabs(SizeClass::small_pool, SizeClass::large_pool);
  set_inactive_split({});
  return SleepBegun::anew;
}

bool Pool::begin_transfer() {
  const MutexLock lock(mutex_);
  if (!sleeping_.is_asleep()) return false;
  begin_transfer_locked(/*is_going=*/false);
  return true;
}

void Pool::begin_transfer_locked(bool is_going) {
  if (sleeping_.is_busy()) {
    throw VmmError("model '" + model().name() + "' is on its way to sleep or back: wait() for that first");
  }
  sleeping_.begin_transfer(is_going);
}

void Pool::end_transfer() {
  const MutexLock lock(mutex_);
  if (sleeping_.is_asleep()) sleeping_.end_transfer();
}

// Slabs are counted with the large ones' memory while there may be none under them.
void Pool::count_slabs(SizeClass from, SizeClass to) {
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (block->state == BlockState::slab && slabs_.holds(*block)) count_slab(*block, from, to);
  }
}

// ------------------------------------------------------------- its ways there and back

std::vector<MovedChunk> Pool::plan_sleep(bool keeps_unchanged, std::span<const Address> everybodys) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return {};
  settle_locked();
  std::vector<ByteRange> staying;
  for (const Address address : everybodys) {
    const Block* const block = live_around(address);  // torch may have cut its own out of ours
    if (block != nullptr) staying.push_back(block->range());
  }
  return sleeping_.plan_to_go(keeps_unchanged, staying);
}

Status Pool::let_go(const MovedChunk& leaving, std::span<const KeptRange> kept) {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  return sleeping_.let_go(leaving, kept, &ended);
}

Status Pool::let_go_again(const MovedChunk& place) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return {};
  return sleeping_.let_go_again(place);
}

std::vector<MovedChunk> Pool::plan_wake(bool joins) {
  KeptRanges ended;  // their backups end with no lock held
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return {};
  settle_locked();
  return sleeping_.plan_to_come(joins, &ended);
}

Address Pool::try_collect(std::span<const MovedChunk> places, Grant* grant, Shortage* shortage) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return base_;
  return sleeping_.collect(places, grant, shortage) ? base_ : 0;
}

void Pool::put_back_collected() {
  const MutexLock lock(mutex_);
  if (sleeping_.is_asleep()) sleeping_.put_back_collected();
}

Status Pool::map_collected(const MovedChunk& place, const StreamUse& filled_by, Epoch* wait_for) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return {};
  return sleeping_.map_collected(place, filled_by, wait_for);
}

Status Pool::arrived(const MovedChunk& chunk) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || !sleeping_.is_asleep()) return {};
  return sleeping_.arrived(chunk);
}

void Pool::end_sleep() {
  std::unique_ptr<Asleep> ended;  // backups end with no lock held
  Unchanged former;
  const MutexLock lock(mutex_);
  end_sleep_locked(&ended, &former);
}

void Pool::end_empty_sleep() {
  std::unique_ptr<Asleep> ended;
  Unchanged former;
  const MutexLock lock(mutex_);
  if (!sleeping_.is_asleep() || sleeping_.is_busy() || !sleeping_.where().is_nothing()) return;
  end_sleep_locked(&ended, &former);
}

void Pool::end_sleep_locked(std::unique_ptr<Asleep>* ended, Unchanged* former) {
  if (!sleeping_.is_asleep()) return;
  const bool goes_on = space_.is_open() && !is_closed();
  *ended = sleeping_.end(goes_on, former);
  count_slabs(SizeClass::large_pool, SizeClass::small_pool);
  if (counters_.current(StatKind::reserved_bytes) == 0) space_.growth().note_empty();
  if (!goes_on) return;
  life_.store(Life::open, std::memory_order_release);
  note_sealed();
}

bool Pool::forget_unchanged() {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  ended = sleeping_.take_all_unchanged();
  return !ended.empty();
}

void Pool::withhold_broken_chunks() {
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return;
  space_.withhold_broken_chunks();
  if (sleeping_.is_asleep()) sleeping_.withhold_broken_chunks();
}

// ----------------------------------------------------------------------------- refused

void Pool::require_awake() const {
  if (!sleeping_.is_asleep()) return;
  const bool is_all = model().life_.load(std::memory_order_acquire) == Life::asleep;
  throw AsleepError(model().name(), is_all ? "" : tag());
}

void Pool::require_taking() const {
  const MutexLock lock(mutex_);
  require_awake();
}

void Pool::require_there(Address address, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  if (sleeping_.is_asleep() && sleeping_.is_missing({address - base_, bytes})) require_awake();
}

// ----------------------------------------------------------------------------- told

bool Pool::is_asleep() const {
  const MutexLock lock(mutex_);
  return sleeping_.is_asleep();
}

std::vector<KeptRange> Pool::kept_in(ByteRange range) const {
  const MutexLock lock(mutex_);
  return sleeping_.is_asleep() ? sleeping_.kept_within(range) : std::vector<KeptRange>();
}

bool Pool::read_kept(Address address, std::size_t size, std::byte* to) {
  const ByteRange range{address - base_, size};
  std::vector<KeptRange> kept;  // and their backups, which nobody writes to any more
  {
    const MutexLock lock(mutex_);
    if (!sleeping_.is_asleep() || sleeping_.is_busy() || !sleeping_.keeps(range)) return false;
    kept = sleeping_.kept_within(range);
  }
  // Takes its time, and no lock: others read meanwhile, and the model may wake.
  for (const KeptRange& each : kept) each.backup->read(each.at, to + (each.offset - range.offset), each.size);
  return true;
}

void Pool::note_place(const std::string& place, bool falls_asleep) {
  const MutexLock lock(mutex_);
  if (sleeping_.is_asleep()) sleeping_.note_place(place, falls_asleep);
}

std::set<std::string> Pool::places_of_backups() const {
  const MutexLock lock(mutex_);
  return sleeping_.is_asleep() ? sleeping_.places_of_backups() : std::set<std::string>();
}

void Pool::forget_names_of_backups() const noexcept {
  const MutexLock lock(mutex_);
  if (sleeping_.is_asleep()) sleeping_.forget_names_of_backups();
}

AsleepWhere Pool::asleep_where() const {
  const MutexLock lock(mutex_);
  return sleeping_.is_asleep() ? sleeping_.where() : AsleepWhere();
}

}  // namespace vmm
