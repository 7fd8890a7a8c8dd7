#include "driver/fork_watch.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

#include "base/sync.h"

namespace vmm {
namespace {

struct Watch {
  Mutex mutex;
  std::vector<ForkObserver*> observers VMM_GUARDED_BY(mutex);
};

// Never destroyed: a fork may come after the static destructors.
Watch& watch() {
  static Watch* const instance = new Watch;
  return *instance;
}

// The list's lock is held from before the fork until after it, on both sides,
// which the analysis cannot follow.
void prepare() VMM_NO_THREAD_SAFETY_ANALYSIS {
  watch().mutex.lock();
  auto& observers = watch().observers;
  for (auto it = observers.rbegin(); it != observers.rend(); ++it) (*it)->before_fork();
}

void in_parent() VMM_NO_THREAD_SAFETY_ANALYSIS {
  for (ForkObserver* observer : watch().observers) observer->after_fork_in_parent();
  watch().mutex.unlock();
}

void in_child() VMM_NO_THREAD_SAFETY_ANALYSIS {
  for (ForkObserver* observer : watch().observers) observer->after_fork_in_child();
  watch().mutex.unlock();
}

}  // namespace

void watch_forks(ForkObserver* observer) {
  static const int registered = pthread_atfork(prepare, in_parent, in_child);
  static_cast<void>(registered);
  const MutexLock lock(watch().mutex);
  watch().observers.push_back(observer);
}

void unwatch_forks(ForkObserver* observer) {
  const MutexLock lock(watch().mutex);
  auto& observers = watch().observers;
  observers.erase(std::remove(observers.begin(), observers.end(), observer), observers.end());
}

}  // namespace vmm
