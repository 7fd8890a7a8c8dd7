// The places to which models go to sleep: one file for all, and files that are in use.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/faces/seals.h"
#include "core/memory/file_backup.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepPlaces : public Sleep {
 protected:
  // Another process that looks, over and over, whether the file was left behind.
  class Looks {
   public:
    explicit Looks(const std::string& path)
        : thread_([this, path] {
            while (!stop_) {
              const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
              if (file < 0) continue;
              ::flock(file, LOCK_EX | LOCK_NB);
              ::close(file);
            }
          }) {}
    Looks(const Looks&) = delete;
    Looks& operator=(const Looks&) = delete;
    ~Looks() {
      stop_ = true;
      thread_.join();
    }

   private:
    std::atomic<bool> stop_{false};
    std::thread thread_;  // last: it reads the flag
  };
};

// Weights that are sealed and a cache that is not, in one file that is named.
TEST_F(SleepPlaces, WhatIsSealedAndWhatIsNotGoToOneFile) {
  const auto model = lab_.pool("model");
  const auto weights = lab_.memory().tagged(model, "w");
  const std::vector<Live> live = fill(*weights, {3 * kMiB});
  const std::vector<Live> own = fill(*model, {3 * kMiB});
  seal_pages(lab_.memory(), *model, pieces(live));
  try {
    sleep(model, file());
    wake(model);
  } catch (const VmmError& error) {
    ADD_FAILURE() << error.what();
  }
  expect_whole(live);
  expect_whole(own);
  unseal_pages(lab_.memory(), *model, pieces(live));
  try {
    sleep(model, file());
    wake(model);
  } catch (const VmmError& error) {
    ADD_FAILURE() << "not sealed: " << error.what();
  }
}

// What an unlocked file costs: whoever takes its path next writes over a model that sleeps.
TEST_F(SleepPlaces, NobodyWritesOverALiveBackup) {
  fs::create_directories(folder_);
  const std::string path = (folder_ / "model").string();
  const Looks looks(path);
  std::vector<std::byte> page(4096, std::byte{7});
  for (int k = 0; k < 60 && !HasFailure(); ++k) {
    try {
      FileBackup backup(lab_.driver, path, kMiB);
      backup.save(0, reinterpret_cast<Address>(page.data()), page.size(), sleeper_.out());
      backup.finish();
      bool is_taken = false;
      for (int attempt = 0; attempt < 5 && !is_taken; ++attempt) {
        try {
          FileBackup second(lab_.driver, path, kMiB);
          is_taken = true;
        } catch (const InvalidArgumentError&) {
        }
      }
      if (!is_taken) continue;
      ADD_FAILURE() << "in round " << k << " a second backup took the file of a live one";
      std::vector<std::byte> read(4096);
      FileBackup third(lab_.driver, (folder_ / "third").string(), kMiB);
      std::printf("size now: %s\n", fs::exists(path) ? std::to_string(fs::file_size(path)).c_str() : "no file");
    } catch (const VmmError& error) {
      std::printf("%d: %s\n", k, error.what());
    }
  }
}

// Somebody looks for what ended processes left behind (remove_left_in() of another process)
// right when a file is made: it is locked all the same.
TEST_F(SleepPlaces, ALiveBackupIsLocked) {
  fs::create_directories(folder_);
  const std::string path = (folder_ / "model").string();
  const Looks looks(path);
  int unlocked = 0;
  int k = 0;
  for (; k < 150 && unlocked == 0; ++k) {
    try {
      FileBackup backup(lab_.driver, path, kMiB);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      for (int attempt = 0; attempt < 3 && unlocked == 0; ++attempt) {
        const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (file >= 0 && ::flock(file, LOCK_EX | LOCK_NB) == 0) ++unlocked;
        if (file >= 0) ::close(file);
      }
    } catch (const VmmError& error) {
      std::printf("%d: %s\n", k, error.what());
      break;
    }
  }
  EXPECT_EQ(unlocked, 0) << "after " << k << " files: another process may take this one for left behind";
}

// One file has all that went there; what is woken of it and goes there again has one beside it.
TEST_F(SleepPlaces, ATagGoesBackToTheFileThatItsModelIsIn) {
  const auto model = lab_.pool("model");
  const auto cache = lab_.memory().tagged(model, "cache");
  const std::vector<Live> live = fill(*model, {3 * kMiB});
  const std::vector<Live> of_cache = fill(*cache, {3 * kMiB});
  const std::string path = file().front().path;
  const auto cache_goes = [&] {
    Transfer out(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{cache, file()}}, false), nullptr);
    go(out);
  };
  const auto cache_comes = [&] {
    Transfer in(nullptr, std::make_unique<Arrival>(sleeper_, PoolList{cache}, Arrival::Memory::collected));
    go(in);
  };
  sleep(model, file());
  for (int round = 0; round < 2; ++round) {
    cache_comes();
    expect_whole(of_cache);
    cache_goes();
    EXPECT_EQ(where(*model), path);
    EXPECT_EQ(where(*cache), path + ".2");
  }
  wake(model);
  expect_whole(live);
  expect_whole(of_cache);
  EXPECT_TRUE(fs::is_empty(folder_));
  cache_goes();
  EXPECT_EQ(where(*cache), path) << "nothing else is there any more";
}

// Wherever a sleep is stopped, by Ctrl-C, what was to be thrown away is there still.
TEST_F(SleepPlaces, WhatIsThrownAwayGoesWhenNothingCanStopTheRest) {
  const auto model = lab_.pool("model");
  const auto cache = lab_.memory().tagged(model, "cache");
  const std::vector<Live> live = fill(*model, {3 * kMiB});
  const std::vector<Live> of_cache = fill(*cache, {3 * kMiB});
  Place nowhere;
  nowhere.kind = Place::Kind::discard;
  bool is_stopped = true;
  int looks = 0;
  for (; is_stopped; ++looks) {
    SCOPED_TRACE(looks);
    is_stopped = false;
    Transfer out(
        std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{cache, {nowhere}}, {model, file()}}, false),
        nullptr);
    out.begin([] {});
    try {
      out.run([&, left = looks]() mutable {
        if (left-- == 0) throw VmmError("stop");
      });
    } catch (const VmmError&) {
      is_stopped = true;
      EXPECT_FALSE(cache->is_asleep());
      expect_whole(live);
      expect_whole(of_cache);
    }
  }
  EXPECT_GT(looks, 4);
  EXPECT_TRUE(cache->is_asleep());
  wake(model);
  expect_whole(live);
}

TEST_F(SleepPlaces, AnotherModelsFileIsInUse) {
  const auto a = lab_.pool("a");
  const auto b = lab_.pool("b");
  const std::vector<Live> of_a = fill(*a, {3 * kMiB});
  const std::vector<Live> of_b = fill(*b, {3 * kMiB});
  sleep(a, file());
  EXPECT_THROW(sleep(b, file()), InvalidArgumentError);
  wake(a);
  expect_whole(of_a);
  expect_whole(of_b);
}

// What a process that was killed has left there goes with the next backup of that name.
TEST_F(SleepPlaces, FilesBesideThatWereLeftBehindGo) {
  const std::string path = file().front().path;
  { const FileBackup left(lab_.driver, FileBackup::beside(path, 2), kMiB); }
  const pid_t child = ::fork();
  if (child == 0) {
    HostDriver host({kPage, kGiB, 1});
    const FileBackup left(host, FileBackup::beside(path, 2), kMiB);
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  std::ofstream(path + ".3") << "somebody's own";
  std::ofstream(path + ".txt") << "somebody's own";
  ASSERT_TRUE(fs::exists(path + ".2"));
  const FileBackup backup(lab_.driver, path, kMiB);
  EXPECT_FALSE(fs::exists(path + ".2"));
  EXPECT_TRUE(fs::exists(path + ".3"));
  EXPECT_TRUE(fs::exists(path + ".txt"));
}

// A child that outlives its parent has no part in the parent's file, whatever it does.
TEST_F(SleepPlaces, AForkedChildHasNoLockOfItsParents) {
  const std::string path = file().front().path;
  const auto is_locked = [&path] {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    EXPECT_GE(descriptor, 0);
    const bool found = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0;
    ::close(descriptor);
    return found;
  };
  std::array<int, 2> lives{};
  std::array<int, 2> begun{};
  ASSERT_EQ(::pipe(lives.data()), 0);
  ASSERT_EQ(::pipe(begun.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    HostDriver host({kPage, kGiB, 1});
    auto backup = std::make_unique<FileBackup>(host, path, kMiB);
    const pid_t ends_first = ::fork();
    if (ends_first == 0) {
      backup.reset();
      ::_exit(0);
    }
    ::waitpid(ends_first, nullptr, 0);
    if (!fs::exists(path) || !is_locked()) ::_exit(1);
    if (::fork() == 0) {  // outlives it
      char end = 0;
      ::close(lives[1]);
      static_cast<void>(::write(begun[1], &end, 1));
      static_cast<void>(::read(lives[0], &end, 1));
      ::_exit(0);
    }
    // A child closes what is not its own as it begins: until then the lock is its as well.
    char has_begun = 0;
    if (::read(begun[0], &has_begun, 1) != 1) ::_exit(2);
    ::_exit(0);  // as one that is killed: nothing is removed
  }
  int status = 0;
  ASSERT_EQ(::waitpid(parent, &status, 0), parent);
  EXPECT_EQ(status, 0) << "a child that ended took the file, or its lock, along";
  EXPECT_FALSE(is_locked()) << "a child that lives keeps the file from whoever would take it over";
  for (const int end : {lives[0], lives[1], begun[0], begun[1]}) ::close(end);
}

// What is released is the driver's at once, to the byte; what is not rests for other models until somebody asks for it.
TEST_F(SleepPlaces, WhatIsReleasedIsTheDriversAtOnce) {
  const auto group = lab_.memory().create_group("g", 768 * kMiB);
  const auto model = lab_.pool(Lab::spec("model"), group.get());
  const auto cache = lab_.memory().tagged(model, "cache");
  const auto other = lab_.pool(Lab::spec("other"), group.get());
  const std::vector<std::size_t> sizes = {3 * kKiB, kMiB, 5 * kMiB};
  const std::vector<Live> live = fill(*model, sizes);
  const std::vector<Live> of_cache = fill(*cache, sizes);
  const std::vector<Live> of_other = fill(*other, sizes);
  lab_.memory().empty_cache();
  const auto is_free = [this] {
    MemoryInfo info;
    EXPECT_TRUE(lab_.driver.memory_info(0, &info).ok());
    return info.free;
  };
  const auto mapped = [&] { return model->physical_bytes() + cache->physical_bytes(); };
  const std::size_t all = is_free() + mapped();
  for (const Places& places : {host(), packed(), file(), discard()}) {
    for (const bool release : {true, false}) {
      SCOPED_TRACE(::testing::Message() << "place " << static_cast<int>(places.front().kind) << ", " << release);
      const std::size_t had = mapped();
      sleep(model, places, release);
      EXPECT_EQ(mapped(), 0U);
      EXPECT_EQ(is_free(), release ? all : all - had);
      EXPECT_EQ(lab_.memory().store().shelved_bytes(*group), release ? 0 : had);
      EXPECT_EQ(lab_.memory().empty_cache(), release ? 0 : had);
      EXPECT_EQ(is_free(), all);
      wake(model);
      EXPECT_EQ(is_free() + mapped(), all);
      if (places.front().kind == Place::Kind::discard) continue;
      expect_whole(live);
      expect_whole(of_cache);
    }
  }
  expect_whole(of_other);
}

}  // namespace
}  // namespace vmm::testing
