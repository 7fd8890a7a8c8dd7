// Every driver call made to fail in turn, in every public operation: the right
// exception or none, everything adds up afterwards, the next call works, and
// nothing is leaked at the end.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <ostream>

#include "core/faces/shared_memory_pool.h"
#include "core/faces/virtual_memory_manager.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

// Two models under one limit of 32 MiB, and the other faces beside them.
struct World {
  World() : lab(make_spec()), shared(lab.memory(), 32 * kMiB) {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    a = shared.register_model("a", spec);
    c = shared.register_model("takes turns", spec);
    spec.page_size = 8 * kMiB;
    b = shared.register_model("b", spec);
    manager.emplace(lab.memory());
    witness = lab.allocate(*a, 2 * kMiB);
    Lab::fill(witness, 64 * kKiB, 99);
  }
  static LabSpec make_spec() {
    LabSpec spec;
    spec.options.store_bytes = 4 * kMiB;  // small: deallocating trims the shelf
    return spec;
  }
  Address allocate(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    return block = lab.memory().allocate(pool, bytes, on);
  }
  void free_block() {
    EXPECT_TRUE(DeviceMemory::free(lab.space, block));
    block = 0;
  }
  void leave_idle(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    allocate(pool, bytes, on);
    free_block();
  }
  // Two models have had the same chunks in turn, which are the second's.
  void hand_over_and_back() {
    for (const auto& model : {a, c, a, c}) {
      leave_idle(*model, 24 * kMiB, kOne);
      lab.memory().settle(/*wait=*/true);
    }
  }
  void add_range() {
    range = manager->reserve(8 * kMiB, VirtualMemoryManager::kDefaultAlignment);
    for (int k = 0; k < 2; ++k) physical.push_back(manager->alloc_physical(kPage, Location::on_device(0), false));
  }
  void map_range() {
    add_range();
    for (std::size_t k = 0; k < 2; ++k) manager->map(range, physical[k], k * kPage);
    manager->set_access(range, Access::read_write, {Location::on_device(0)}, 0, 2 * kPage);
  }

  Lab lab;
  SharedMemoryPool shared;
  std::shared_ptr<Pool> a;  // chunk sizes by the request
  std::shared_ptr<Pool> b;  // chunks of 8 MiB
  std::shared_ptr<Pool> c;  // as a
  std::optional<VirtualMemoryManager> manager;
  Address witness = 0;
  Address block = 0;
  VirtualAddressRange range;
  std::vector<PhysicalAllocation> physical;
};

struct Operation {
  const char* name;
  std::function<void(World&)> prepare;
  std::function<void(World&)> run;
  bool throws = true;                       // false: whatever the driver says, it must not
  std::function<void(World&)> expect = {};  // what holds after a run that did not throw
  std::function<void(World&)> undone = {};  // what holds after one that threw
};
void PrintTo(const Operation& operation, std::ostream* out) { *out << operation.name; }

void nothing(World& /*world*/) {}

std::size_t mappings(World& w) { return w.manager->mappings(w.range).size(); }

const Operation kOperations[] = {
    {"create_pool", nothing, [](World& w) { w.lab.pool("c"); }},
    {"allocate_new_memory", nothing, [](World& w) { w.allocate(*w.a, 20 * kMiB, kOne); }},
    {"allocate_small", nothing, [](World& w) { w.allocate(*w.b, 100, kOne); }},
    {"allocate_by_moving_own_chunks",
     [](World& w) {
       w.leave_idle(*w.a, 30 * kMiB, kOne);
       w.lab.driver.hold_fences(kOne);
     },
     [](World& w) { w.allocate(*w.a, 30 * kMiB, kTwo); }},
    {"allocate_what_another_model_left_under_held_fences",
     [](World& w) {
       w.leave_idle(*w.b, 24 * kMiB, kOne);
       w.lab.driver.hold_fences(kOne);
     },
     [](World& w) { w.allocate(*w.a, 30 * kMiB, kTwo); }},
    {"allocate_by_melting_another_models_chunks", [](World& w) { w.leave_idle(*w.a, 30 * kMiB, kOne); },
     [](World& w) { w.allocate(*w.b, 24 * kMiB, kTwo); }},
    {"allocate_what_comes_back_from_another_model", [](World& w) { w.hand_over_and_back(); },
     [](World& w) { w.allocate(*w.a, 24 * kMiB, kOne); }},
    {"allocate_where_chunks_were_that_are_elsewhere",  // they are unmapped there first
     [](World& w) {
       w.leave_idle(*w.a, 24 * kMiB, kOne);
       w.lab.memory().allocate_pages(*w.c, 0, 24 * kMiB, kOne);
       w.lab.memory().settle(/*wait=*/true);
       w.shared.set_physical_limit(64 * kMiB);
     },
     [](World& w) { w.allocate(*w.a, 24 * kMiB, kOne); }, /*throws=*/true,
     [](World& w) { w.shared.set_physical_limit(32 * kMiB); },
     [](World& w) { w.shared.set_physical_limit(32 * kMiB); }},
    {"hand_chunks_back_and_forth", nothing,
     [](World& w) {
       for (int turn = 0; turn < 2; ++turn) {
         for (const auto& model : {w.a, w.c}) {
           w.leave_idle(*model, 24 * kMiB, kOne);
           w.lab.memory().settle(/*wait=*/true);
         }
       }
     }},
    {"close_a_pool_whose_chunks_are_elsewhere", [](World& w) { w.hand_over_and_back(); },
     [](World& w) { w.shared.unregister_model("takes turns", /*force=*/false); }, /*throws=*/false},
    {"allocate_more_than_there_is", nothing, [](World& w) { EXPECT_THROW(w.allocate(*w.a, 40 * kMiB), VmmError); }},
    {"allocate_pages", nothing, [](World& w) { w.lab.memory().allocate_pages(*w.b, 0, 20 * kMiB, kOne); }},
    {"allocate_for_model", nothing, [](World& w) { w.shared.allocate_for_model("b", 9 * kMiB, kOne); }},
    {"deallocate_pages", [](World& w) { w.lab.memory().allocate_pages(*w.b, 0, 24 * kMiB, kOne); },
     [](World& w) { w.lab.memory().deallocate_pages(*w.b, 0, 16 * kMiB); }, /*throws=*/false},
    {"deallocate_pages_under_held_fences",
     [](World& w) {
       w.lab.memory().allocate_pages(*w.a, 16 * kMiB, 13 * kMiB, kOne);
       w.lab.driver.hold_fences(kTwo);
     },
     [](World& w) { w.shared.deallocate_for_model("a", 18 * kMiB, 6 * kMiB); }, /*throws=*/false},
    {"free", [](World& w) { w.allocate(*w.a, 5 * kMiB, kOne); }, [](World& w) { w.free_block(); }, /*throws=*/false},
    {"free_after_record_stream",
     [](World& w) {
       w.allocate(*w.a, 5 * kMiB, kOne);
       w.a->record_stream(w.block, kTwo);
       w.lab.driver.hold_fences(kTwo);
     },
     [](World& w) { w.free_block(); }, /*throws=*/false},
    {"settle",
     [](World& w) {
       w.allocate(*w.a, 5 * kMiB, kOne);
       w.a->record_stream(w.block, kTwo);
       w.free_block();
       w.a->shed(0);
     },
     [](World& w) { w.lab.memory().settle(/*wait=*/true); }, /*throws=*/false},
    {"trim", [](World& w) { w.leave_idle(*w.b, 24 * kMiB, kOne); }, [](World& w) { w.lab.memory().trim(*w.b, kPage); },
     /*throws=*/false},
    {"empty_cache",
     [](World& w) {
       w.leave_idle(*w.b, 16 * kMiB, kOne);
       w.leave_idle(*w.a, 8 * kMiB, kTwo);
     },
     [](World& w) { w.lab.memory().empty_cache(); }, /*throws=*/false},
    {"set_limit", [](World& w) { w.leave_idle(*w.b, 24 * kMiB, kOne); },
     [](World& w) { w.shared.set_physical_limit(4 * kMiB); }, /*throws=*/false,
     [](World& w) { w.shared.set_physical_limit(32 * kMiB); }},
    {"statistics", [](World& w) { w.leave_idle(*w.b, 24 * kMiB, kOne); },
     [](World& w) {
       EXPECT_EQ(w.b->memory_stats().idle_bytes, 24 * kMiB);
       EXPECT_EQ(w.shared.global_stats().num_models, 3U);
       EXPECT_EQ(w.lab.memory().statistics()[StatKind::allocation][0].current, 1);
       EXPECT_EQ(w.b->snapshot().size(), 1U);
     },
     /*throws=*/false},
    {"unregister_model",
     [](World& w) {
       w.leave_idle(*w.b, 16 * kMiB, kOne);
       w.lab.driver.hold_fences(kOne);
     },
     [](World& w) { w.shared.unregister_model("b", /*force=*/false); }, /*throws=*/false, [](World& w) { w.b = w.a; }},
    {"unregister_model_by_force_then_free",
     [](World& w) {
       w.allocate(*w.b, 16 * kMiB, kOne);
       w.lab.memory().allocate_pages(*w.b, 512 * kMiB, 8 * kMiB, kTwo);
     },
     [](World& w) {
       w.shared.unregister_model("b", /*force=*/true);
       w.free_block();
     },
     /*throws=*/false, [](World& w) { w.b = w.a; }},
    {"register_model", nothing,
     [](World& w) {
       ModelSpec spec;
       spec.virtual_capacity = kGiB;
       w.shared.register_model("c", spec);
     },
     /*throws=*/true, [](World& w) { EXPECT_TRUE(w.shared.has_model("c")); },
     [](World& w) { EXPECT_FALSE(w.shared.has_model("c")); }},
    {"reserve", nothing, [](World& w) { w.range = w.manager->reserve(8 * kMiB, 4 * kMiB); }},
    {"release", [](World& w) { w.add_range(); }, [](World& w) { w.manager->release(w.range); }, true, nothing,
     [](World& w) { EXPECT_NO_THROW(w.manager->release(w.range)) << "it is still there"; }},
    {"alloc_physical", nothing,
     [](World& w) { w.physical.push_back(w.manager->alloc_physical(kPage, Location::on_device(0), false)); }},
    {"free_physical", [](World& w) { w.add_range(); }, [](World& w) { w.manager->free_physical(w.physical[0]); }},
    {"map", [](World& w) { w.add_range(); }, [](World& w) { w.manager->map(w.range, w.physical[0], kPage); }, true,
     [](World& w) { EXPECT_EQ(mappings(w), 1U); }, [](World& w) { EXPECT_EQ(mappings(w), 0U); }},
    {"unmap", [](World& w) { w.map_range(); }, [](World& w) { w.manager->unmap(w.range, 0, 2 * kPage); }, true,
     [](World& w) { EXPECT_EQ(mappings(w), 0U); }, [](World& w) { EXPECT_EQ(mappings(w), 2U) << "all or nothing"; }},
    {"set_access", [](World& w) { w.map_range(); },
     [](World& w) { w.manager->set_access(w.range, Access::read, {Location::on_device(0)}, 0, 2 * kPage); }, true,
     nothing, [](World& w) { EXPECT_EQ(w.manager->mappings(w.range)[0].access, Access::read_write); }},
    {"set_access_of_all_that_is_mapped",
     [](World& w) {
       w.add_range();
       w.manager->map(w.range, w.physical[0], 0);
       w.manager->map(w.range, w.physical[1], 2 * kPage);
       w.manager->set_access(w.range, Access::read_write, {Location::on_device(0)}, 0, 0);
     },
     [](World& w) { w.manager->set_access(w.range, Access::read, {Location::on_device(0)}, 0, 0); }, true, nothing,
     [](World& w) {
       for (const MappingRecord& record : w.manager->mappings(w.range)) {
         EXPECT_EQ(record.access, Access::read_write) << "all or nothing, at " << record.va_offset;
       }
     }},
    {"close_the_manager", [](World& w) { w.map_range(); }, [](World& w) { w.manager->close(); }, true,
     [](World& w) { w.manager.emplace(w.lab.memory()); }},
};

class FaultSweep : public ::testing::TestWithParam<Operation> {
 protected:
  // Runs the operation with its n-th call failing; false when it made fewer.
  static bool fail_one(const Operation& operation, std::uint64_t n, const Status& status) {
    SCOPED_TRACE("call " + std::to_string(n) + " answers " + status.text());
    World world;
    operation.prepare(world);
    world.lab.driver.clear_calls();
    world.lab.driver.fail_nth_call(n, status);
    bool threw = false;
    try {
      operation.run(world);
    } catch (const OutOfMemoryError& error) {
      threw = true;
      EXPECT_EQ(status.code(), StatusCode::out_of_memory) << "no lack of memory: " << error.what();
    } catch (const DriverError& error) {
      threw = true;
      EXPECT_EQ(error.name, status.driver_name());
      EXPECT_EQ(error.code, status.driver_code());
      EXPECT_NE(status.code(), StatusCode::out_of_memory) << error.what();
    }
    const bool failed = world.lab.driver.failures() != 0;
    std::string culprit;
    for (const CallRecord& call : world.lab.driver.calls()) {
      if (call.answer == status.code()) culprit = call.text();
    }
    SCOPED_TRACE("the call: " + culprit);
    EXPECT_TRUE(!threw || (failed && operation.throws)) << "threw without a reason";
    world.lab.driver.clear_failures();
    world.lab.memory().check();
    if (threw && operation.undone) operation.undone(world);
    if (!threw && operation.expect) operation.expect(world);
    expect_all_works(world);
    world.manager.reset();
    if (world.block != 0) world.free_block();
    world.shared.close(/*force=*/true);
    world.a.reset();
    world.b.reset();
    world.c.reset();
    world.lab.close();
    return failed;
  }

  static void expect_all_works(World& world) {
    world.lab.driver.release_fences();
    EXPECT_TRUE(Lab::holds(world.witness, 64 * kKiB, 99)) << "another block's content";
    if (world.block != 0) world.free_block();
    for (const auto& pool : world.lab.memory().pools()) pool->drop_pages();
    for (Pool* pool : {world.a.get(), world.b.get()}) {
      const Address again = world.lab.allocate(*pool, 6 * kMiB, kTwo);
      Lab::fill(again + 6 * kMiB - 4096, 4096, 5);
      EXPECT_TRUE(Lab::holds(again + 6 * kMiB - 4096, 4096, 5));
      world.lab.free(again);
      EXPECT_LE(world.shared.global_stats().physical_usage, 32 * kMiB);
    }
    EXPECT_LE(world.lab.driver.live_chunk_bytes(), world.lab.memory().committed_bytes());
    world.lab.free(world.witness);
  }
};

TEST_P(FaultSweep, OneFailingCallLeavesNoTrace) {
  for (const Status& status : {no_memory(), broken()}) {
    std::uint64_t n = 1;
    while (fail_one(GetParam(), n, status)) {
      ASSERT_LT(++n, 400U);
      if (HasFailure()) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryOperation, FaultSweep, ::testing::ValuesIn(kOperations),
                         [](const auto& operation) { return operation.param.name; });

}  // namespace
}  // namespace vmm::testing
