// Requests that nothing could meet, whoever gave back what: refused with nobody's memory touched.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>

#include "core/faces/virtual_memory_manager.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kDevice = 64 * kMiB;

// Under a limit of 48 MiB: `idle` has 8 MiB unused, the group's shelf has 4. Outside of it:
// `other` has 8.
class ImpossibleRequests : public ::testing::Test {
 protected:
  ImpossibleRequests() {
    lab_.memory().ladder().set_memory_callback([this] {
      ++asked_;
      return callback_ && callback_();
    });
    lab_.memory().set_on_out_of_memory([this](const Pool&, std::size_t, Stream) { ++told_; });
    lab_.leave_idle(*other_, 8 * kMiB);
    lab_.leave_idle(*idle_, 12 * kMiB);
    idle_->shed(8 * kMiB);
  }
  std::shared_ptr<Pool> model(const std::string& name, std::size_t limit = kUnlimited) {
    return lab_.pool(Lab::spec(name, limit), &group_);
  }
  // That `request` is refused, as the request of a pool, and changed nothing.
  template <typename Request>
  OutOfMemoryError refused(const Request& request) {
    const std::size_t calls = memory_calls();
    std::optional<OutOfMemoryError> found;
    try {
      request();
      ADD_FAILURE() << "it cannot be met";
    } catch (const OutOfMemoryError& error) {
      found.emplace(error);
    }
    EXPECT_EQ(memory_calls(), calls) << "of the driver, for memory or to wait";
    EXPECT_EQ(idle_->idle_bytes(), 8 * kMiB);
    EXPECT_EQ(other_->idle_bytes(), 8 * kMiB);
    EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), 4 * kMiB);
    lab_.memory().check();
    return *found;
  }
  std::size_t memory_calls() const {
    std::size_t calls = 0;
    for (const Call call : {Call::create, Call::release, Call::map, Call::unmap, Call::set_access, Call::wait,
                            Call::synchronize, Call::record, Call::fill_async}) {
      calls += lab_.driver.count(call);
    }
    return calls;
  }

  Lab lab_{LabSpec{kDevice}};
  const std::shared_ptr<Budget> owned_group_ = lab_.memory().create_group("the shared pool", 48 * kMiB);
  Budget& group_ = *owned_group_;
  const std::shared_ptr<Pool> other_ = lab_.pool("other");
  const std::shared_ptr<Pool> idle_ = model("idle");
  std::function<bool()> callback_;
  int asked_ = 0;
  int told_ = 0;
};

TEST_F(ImpossibleRequests, BeyondTheDeviceAskNobody) {
  const auto asker = lab_.pool("asker");
  const OutOfMemoryError error = refused([&] { lab_.allocate(*asker, 10 * kDevice); });
  EXPECT_EQ(error.requested, 10 * kDevice);
  EXPECT_EQ(error.limit, kDevice);
  EXPECT_EQ(error.pool, "asker");
  const std::string text = error.what();
  for (const char* part :
       {"pool 'asker': 640 MiB asked", "device: 64 MiB, free 44 MiB", "'other' 0 B in use + 8 MiB idle",
        "'idle' 0 B in use + 8 MiB idle", "ask for less: the device has 64 MiB in all"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is missing in: " << text;
  }
  EXPECT_EQ(text.find("driver"), std::string::npos) << "it was not asked: " << text;
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(asked_, 0);
  EXPECT_EQ(asker->statistics().num_ooms, 1);
  lab_.allocate(*asker, 32 * kMiB);  // what fits still works
}

TEST_F(ImpossibleRequests, BeyondTheDeviceByAByteAskNobody) {
  const auto asker = lab_.pool("asker");
  refused([&] { lab_.allocate(*asker, kDevice + 1); });
}

TEST_F(ImpossibleRequests, BeyondTheDeviceAskNobodyForPagesAndAtAnAddress) {
  const auto asker = lab_.pool("asker");
  DeviceMemory& memory = lab_.memory();
  refused([&] { memory.allocate_pages(*asker, 0, 2 * kDevice, nullptr); });
  refused([&] { memory.allocate_first(*asker, 2 * kDevice, nullptr); });
  const Address begin = lab_.allocate(*asker, kPage);
  lab_.free(begin);
  refused([&] { memory.allocate_at(*asker, begin, 2 * kDevice, nullptr); });
  EXPECT_EQ(told_, 3);
}

TEST_F(ImpossibleRequests, BeyondTheAddressesAskNobody) {
  PoolSpec spec = Lab::spec("asker");
  spec.capacity = 8 * kMiB;
  const auto asker = lab_.pool(spec);
  const OutOfMemoryError error = refused([&] { lab_.allocate(*asker, 10 * kMiB); });
  EXPECT_NE(std::string(error.what()).find("virtual capacity of 8 MiB"), std::string::npos) << error.what();
}

TEST_F(ImpossibleRequests, BeyondALimitAskNobodyButTheCallback) {
  const auto limited = model("limited", 16 * kMiB);
  const OutOfMemoryError own = refused([&] { lab_.allocate(*limited, 20 * kMiB); });
  EXPECT_EQ(own.limit, 16 * kMiB);
  EXPECT_EQ(asked_, 1);
  const auto asker = model("asker");
  const OutOfMemoryError shared = refused([&] { lab_.allocate(*asker, 50 * kMiB); });
  EXPECT_EQ(shared.limit, 48 * kMiB);
  EXPECT_NE(std::string(shared.what()).find("refused by the limit of the shared pool"), std::string::npos);
  EXPECT_EQ(asked_, 2);
  EXPECT_EQ(told_, 2);
  lab_.memory().set_limit(lab_.memory().budget(), 40 * kMiB);
  const auto outside = lab_.pool("outside");
  EXPECT_EQ(refused([&] { lab_.allocate(*outside, 44 * kMiB); }).limit, 40 * kMiB);
}

TEST_F(ImpossibleRequests, AreMetWhereTheCallbackRaisesTheLimit) {
  const auto asker = model("asker", 16 * kMiB);
  callback_ = [&] {
    asker->budget().set_limit(kUnlimited);
    return false;  // it has freed nothing
  };
  lab_.allocate(*asker, 44 * kMiB);  // of 48, what is idle has to go
  EXPECT_EQ(asked_, 1);
  EXPECT_EQ(told_, 0);
}

TEST_F(ImpossibleRequests, OfAClosedPoolAreThatPools) {
  const auto asker = lab_.pool("asker");
  lab_.memory().close_pool(*asker, false);
  EXPECT_THROW(lab_.allocate(*asker, 10 * kDevice), InvalidArgumentError);
}

TEST_F(ImpossibleRequests, ByHandLeaveWhatPoolsHaveIdle) {
  VirtualMemoryManager manager(lab_.memory());
  for (const std::size_t bytes : {10 * kDevice, kDevice + kPage}) {
    EXPECT_THROW(manager.alloc_physical(bytes, Location::on_device(0), false), OutOfMemoryError);
    EXPECT_EQ(idle_->idle_bytes(), 8 * kMiB);
    EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), 4 * kMiB);
  }
}

TEST(ImpossibleRequestsInDebugMode, AskNobodyEither) {
  LabSpec spec{kDevice};
  spec.options.debug = parse_debug_mode("guard");
  Lab lab(spec);
  const auto idle = lab.pool("idle");
  const auto asker = lab.pool("asker");
  const std::size_t created = lab.driver.count(Call::create);
  EXPECT_THROW(lab.allocate(*asker, 2 * kDevice), OutOfMemoryError);
  EXPECT_EQ(lab.driver.count(Call::create), created);
}

}  // namespace
}  // namespace vmm::testing
