// Who must know that the process forks. It owns one list, known to
// pthread_atfork once; it never knows what an observer guards.
//
// Observers are told in the order that keeps locks ordered: before_fork() goes
// from the newest to the oldest, so what was built later and stands higher (a
// pool) takes its locks before what it stands on (a driver); afterwards they
// are told from the oldest to the newest.
#pragma once

namespace vmm {

class ForkObserver {
 public:
  ForkObserver() = default;
  ForkObserver(const ForkObserver&) = delete;
  ForkObserver& operator=(const ForkObserver&) = delete;

  // Takes the locks that must be free and consistent in the child.
  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  // Runs in the only thread that the child has. It must not allocate: another
  // thread may have held the allocator's lock when the process forked.
  virtual void after_fork_in_child() = 0;

 protected:
  ~ForkObserver() = default;
};

// REQUIRES: the caller holds no lock that the observer takes in before_fork().
void watch_forks(ForkObserver* observer);
void unwatch_forks(ForkObserver* observer);

}  // namespace vmm
