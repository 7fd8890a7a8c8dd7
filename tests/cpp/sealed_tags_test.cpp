// A tag's space while some of its memory is read-only: what is sealed with what, where its
// requests go meanwhile, and when it serves again.
#include <gtest/gtest.h>

#include <map>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/faces/seals.h"
#include "lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

SealedPiece piece(Address address, std::size_t bytes) { return {address, bytes}; }

TEST(SealedTags, AllOfATagIsSealedAndServesAgain) {
  Lab lab;
  const auto model = lab.pool("a", 32 * kMiB);
  const auto weights = lab.memory().tagged(model, "weights");
  const Address large = lab.allocate(*weights, 5 * kMiB);
  const Address small = lab.allocate(*weights, 4 * kKiB);
  const Address neighbour = lab.allocate(*weights, 512);
  Lab::fill(large, 5 * kMiB, 1);
  // Whatever shares a chunk has to be sealed too.
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(large, 5 * kMiB), piece(small, 4 * kKiB)}),
               InvalidArgumentError);
  EXPECT_FALSE(weights->has_read_only(large, 5 * kMiB));
  lab.free(neighbour);
  seal_pages(lab.memory(), *model, {piece(large, 5 * kMiB), piece(small, 4 * kKiB)});
  EXPECT_TRUE(weights->is_read_only(large, 5 * kMiB) && weights->is_read_only(small, 4 * kKiB));
  EXPECT_TRUE(Lab::holds(large, 5 * kMiB, 1));
  seal_pages(lab.memory(), *model, {piece(small + 512, 512)});  // again, and of a view
  // What is made now stands on further chunks, on whatever way it is asked for.
  for (const auto& open : {weights, lab.memory().tagged(model, "weights")}) {
    for (const std::size_t bytes : {std::size_t{512}, 4 * kKiB, 3 * kMiB}) {
      const Address fresh = lab.allocate(*open, bytes);
      Lab::fill(fresh, bytes, 2);
      lab.free(fresh);
    }
  }
  EXPECT_EQ(lab.memory().tags_of(*model), (std::map<std::string, std::size_t>{{"weights", 5 * kMiB + 4 * kKiB}}));
  lab.free(small);  // is not kept by the thread either: it would be its next block
  Lab::fill(lab.allocate(*lab.memory().tagged(model, "weights"), 4 * kKiB), 4 * kKiB, 3);
  unseal_pages(lab.memory(), *model, {piece(large, 5 * kMiB)});
  Lab::fill(large, 5 * kMiB, 4);
}

TEST(SealedTags, AllThatLivesInAChunkHasToBeGiven) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const Address block = lab.allocate(*weights, 6 * kMiB);
  const auto part = [](Address at, std::size_t bytes) { return SealedPiece{at, bytes, /*is_last=*/false}; };
  for (const SealedPiece& slice : {part(block, 512), part(block, 6 * kMiB - 1), piece(block + 512, 6 * kMiB - 512)}) {
    EXPECT_THROW(seal_pages(lab.memory(), *model, {slice}), InvalidArgumentError);
    EXPECT_FALSE(weights->has_read_only(block, 6 * kMiB));
  }
  seal_pages(lab.memory(), *model, {part(block, 1000), piece(block + 1000, 6 * kMiB - 1000)});
  EXPECT_TRUE(weights->is_read_only(block, 6 * kMiB));
  EXPECT_THROW(unseal_pages(lab.memory(), *model, {part(block, 512)}), InvalidArgumentError);
  EXPECT_TRUE(weights->is_read_only(block, 6 * kMiB));
}

// What was mapped beyond a request is free from the first, and may be being zeroed for it.
TEST(SealedTags, TheRestOfAChunkIsWaitedForToo) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  lab.driver.hold_fences();
  const Address block = lab.allocate(*weights, 3 * kMiB, kOne);
  Epoch wait_for = kLongAgo;
  weights->set_memory_access({piece(block, 3 * kMiB)}, Access::read, &wait_for);
  EXPECT_NE(wait_for, kLongAgo) << "queued work may write there still";
  EXPECT_FALSE(weights->is_read_only(block, 3 * kMiB));
  lab.driver.release_fences();
  EXPECT_TRUE(lab.memory().clock().wait(std::exchange(wait_for, kLongAgo)).ok());
  weights->set_memory_access({piece(block, 3 * kMiB)}, Access::read, &wait_for);
  EXPECT_EQ(wait_for, kLongAgo);
  EXPECT_TRUE(weights->is_read_only(block, 3 * kMiB));
}

TEST(SealedTags, FreedMemoryIsWritableWhereverItGoes) {
  Lab lab;
  const auto model = lab.pool("a", 16 * kMiB);
  for (int round = 0; round < 3; ++round) {
    const auto weights = lab.memory().tagged(model, "weights");
    const Address block = lab.allocate(*weights, 12 * kMiB);
    seal_pages(lab.memory(), *model, {piece(block, 12 * kMiB)});
    lab.free(block);
    const Address other = lab.allocate(round % 2 == 0 ? *model : *weights, 16 * kMiB);
    Lab::fill(other, 16 * kMiB, 5);
    lab.free(other);
  }
  // No space is left sealed with nothing in it.
  EXPECT_LE(lab.memory().family(*model).size(), 3U);
  const auto space = lab.memory().tagged(model, "weights");
  EXPECT_FALSE(space->is_sealed());
}

TEST(SealedTags, ASpaceTakesRequestsAgainWhenNothingInItIsSealed) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto first = lab.memory().tagged(model, "weights");
  const Address one = lab.allocate(*first, 4 * kMiB);
  seal_pages(lab.memory(), *model, {piece(one, 4 * kMiB)});
  const auto second = lab.memory().tagged(model, "weights");
  EXPECT_NE(second, first);
  const Address two = lab.allocate(*second, 4 * kMiB);
  seal_pages(lab.memory(), *model, {piece(two, 4 * kMiB)});
  unseal_pages(lab.memory(), *model, {piece(one, 4 * kMiB)});
  EXPECT_EQ(lab.memory().tagged(model, "weights"), first);
  seal_pages(lab.memory(), *model, {piece(one, 4 * kMiB)});
  lab.free(two);  // sealed when it was freed
  EXPECT_EQ(lab.memory().tagged(model, "weights"), second);
  Lab::fill(lab.allocate(*second, 4 * kMiB), 4 * kMiB, 6);
}

// A free of what is sealed must not make the thread keep blocks of the space again.
TEST(SealedTags, ThreadsKeepNothingOfWhatIsFreedSealed) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  std::vector<Address> blocks;
  std::vector<SealedPiece> pieces;
  for (int k = 0; k < 100; ++k) {
    blocks.push_back(lab.allocate(*weights, 4 * kKiB));
    pieces.push_back(piece(blocks.back(), 4 * kKiB));
  }
  seal_pages(lab.memory(), *model, pieces);
  for (const Address block : blocks) lab.free(block);
  EXPECT_EQ(lab.memory().kept_blocks(*weights), 0U);
  EXPECT_EQ(lab.memory().tagged(model, "weights"), weights) << "nothing in it is sealed";
  EXPECT_FALSE(weights->is_sealed());
}

TEST(SealedTags, NoAddressIsGivenOutOfASealedSpace) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const Address block = lab.allocate(*weights, 3 * kMiB);  // and a mebibyte of its chunk is free
  seal_pages(lab.memory(), *model, {piece(block, 3 * kMiB)});
  EXPECT_THROW(lab.memory().allocate_at(*weights, block + 3 * kMiB, 512, kOne), InvalidArgumentError);
}

// What another thread allocates, uses and frees between a seal's wait and the seal itself.
TEST(SealedTags, NothingIsReadOnlyUnderQueuedWork) {
  Lab lab;
  const auto model = lab.pool("a", 64 * kMiB);
  const auto weights = lab.memory().tagged(model, "weights");
  const Address block = lab.allocate(*weights, 5 * kMiB / 2, kOne);  // its chunk has free space
  bool is_done = false;
  Epoch freed_at = kLongAgo;
  Address used = 0;
  lab.driver.hold_fences(kOne);
  lab.driver.before(Call::wait, [&] {
    if (is_done) return;
    is_done = true;
    std::thread([&] {
      used = lab.memory().allocate(*weights, 5 * kMiB / 4, kOne);
      freed_at = lab.memory().clock().now();
      DeviceMemory::free(lab.space, used);
    }).join();
  });
  seal_pages(lab.memory(), *model, {piece(block, 5 * kMiB / 2)});
  lab.driver.before(Call::wait, nullptr);
  EXPECT_TRUE(is_done);
  EXPECT_TRUE(lab.memory().clock().has_passed(freed_at) || !weights->has_read_only(used, 5 * kMiB / 4));
}

TEST(SealedTags, ARequestThatClimbsMeanwhileGoesToAnotherSpace) {
  Lab lab;
  const auto model = lab.pool("a", 8 * kPage);
  const auto other = lab.pool("b");
  lab.leave_idle(*other, 8 * kPage, kTwo);
  const auto weights = lab.memory().tagged(model, "weights");
  const Address kept = lab.allocate(*weights, 2 * kPage, kOne);
  const Address held = lab.allocate(*model, 6 * kPage, kOne);
  bool is_done = false;
  lab.memory().ladder().set_memory_callback([&] {
    if (is_done) return false;
    is_done = true;
    std::thread([&] {
      seal_pages(lab.memory(), *model, {piece(kept, 2 * kPage)});
      lab.free(held);
    }).join();
    return true;
  });
  const std::size_t idle = other->memory_stats().idle_bytes;
  const Address fresh = lab.allocate(*weights, 3 * kPage, kOne);
  EXPECT_TRUE(is_done && !weights->contains(fresh));
  EXPECT_EQ(other->memory_stats().idle_bytes, idle) << "given back in vain";
  lab.memory().ladder().set_memory_callback(nullptr);
}

TEST(SealedTags, OnlyLiveTensorsOfATagCanBe) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const Address loose = lab.allocate(*model, 4 * kMiB);
  const Address block = lab.allocate(*weights, 4 * kMiB);
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(loose, 4 * kMiB)}), InvalidArgumentError);
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(block, 4 * kMiB), piece(loose, 4 * kMiB)}),
               InvalidArgumentError);
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(block, 5 * kMiB)}), InvalidArgumentError);
  EXPECT_THROW(seal_pages(lab.memory(), *lab.pool("b"), {piece(block, 4 * kMiB)}), InvalidArgumentError);
  lab.free(block);
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(block, 4 * kMiB)}), InvalidArgumentError);
  EXPECT_FALSE(weights->is_sealed());
}

// Each call in turn: nothing is sealed, and the space takes requests.
TEST(SealedTags, AFailedSealChangesNothing) {
  for (std::size_t nth = 1;; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    LabSpec spec;
    spec.device_count = 2;
    Lab lab(spec);
    const auto model = lab.pool("a");
    ASSERT_TRUE(lab.memory().add_accessor(Location::on_device(1)).ok());
    const auto weights = lab.memory().tagged(model, "weights");
    const auto other = lab.memory().tagged(model, "other");
    const Address one = lab.allocate(*weights, 4 * kMiB);
    const Address two = lab.allocate(*other, 4 * kMiB);
    lab.driver.fail_nth(Call::set_access, nth, broken());
    bool failed = false;
    try {
      seal_pages(lab.memory(), *model, {piece(one, 4 * kMiB), piece(two, 4 * kMiB)});
    } catch (const VmmError&) {
      failed = true;
    }
    lab.driver.clear_failures();
    EXPECT_EQ(weights->is_sealed(), !failed);
    EXPECT_EQ(other->is_sealed(), !failed);
    if (!failed) {
      EXPECT_EQ(nth, 5U) << "two devices, two stretches";
      break;
    }
    Lab::fill(one, 4 * kMiB, 1);
    Lab::fill(two, 4 * kMiB, 2);
    Lab::fill(lab.allocate(*weights, 512), 512, 3);
  }
}

// A driver may lack memory for its own notes, there too where the seal is undone: what it cannot
// make writable stays sealed, and serves nobody.
TEST(SealedTags, AnUndoneSealThatTheDriverCannotNoteStays) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const auto other = lab.memory().tagged(model, "other");
  const Address one = lab.allocate(*weights, 4 * kMiB);
  const Address two = lab.allocate(*other, 4 * kMiB);
  int calls = 0;
  lab.driver.before(Call::set_access, [&] {
    if (++calls > 1) throw std::bad_alloc();
  });
  EXPECT_THROW(seal_pages(lab.memory(), *model, {piece(one, 4 * kMiB), piece(two, 4 * kMiB)}), std::bad_alloc);
  lab.driver.before(Call::set_access, nullptr);
  EXPECT_TRUE(weights->is_sealed());
  EXPECT_TRUE(weights->is_read_only(one, 4 * kMiB));
  EXPECT_FALSE(other->is_sealed());
  EXPECT_NE(lab.memory().pool_at(lab.allocate(*lab.memory().tagged(model, "weights"), 512)), weights);
  unseal_pages(lab.memory(), *model, {piece(one, 4 * kMiB)});
  EXPECT_FALSE(weights->is_sealed());
  Lab::fill(one, 4 * kMiB, 1);
  Lab::fill(two, 4 * kMiB, 2);
}

// Blocks that are watched for writes beyond them are sealed as others are.
TEST(SealedTags, WatchedBlocksAreSealedToo) {
  for (const char* mode : {"guard", "canary"}) {
    SCOPED_TRACE(mode);
    LabSpec spec;
    spec.options.debug = parse_debug_mode(mode);
    Lab lab(spec);
    const auto model = lab.pool("a");
    const auto weights = lab.memory().tagged(model, "weights");
    const Address large = lab.allocate(*weights, 5 * kMiB);
    const Address small = lab.allocate(*weights, 1000);
    Lab::fill(large, 5 * kMiB, 1);
    seal_pages(lab.memory(), *model, {piece(large, 5 * kMiB), piece(small, 1000)});
    EXPECT_TRUE(weights->is_read_only(large, 5 * kMiB) && weights->is_read_only(small, 1000));
    const Address fresh = lab.allocate(*weights, 1000);
    Lab::fill(fresh, 1000, 2);
    EXPECT_TRUE(lab.memory().check_watched().empty());
    lab.free(small);
    unseal_pages(lab.memory(), *model, {piece(large, 5 * kMiB)});
    Lab::fill(large, 5 * kMiB, 3);
    seal_pages(lab.memory(), *model, {piece(large, 5 * kMiB)});
    lab.free(large);  // while it is sealed
    EXPECT_TRUE(lab.memory().check_watched().empty());
    lab.memory().empty_cache();
    Lab::fill(lab.allocate(*lab.memory().tagged(model, "weights"), 5 * kMiB), 5 * kMiB, 4);
    EXPECT_TRUE(lab.memory().check_watched().empty());
  }
}

TEST(SealedTagsDeathTest, AWriteFaults) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const Address block = lab.allocate(*weights, 4 * kMiB);
  const Address small = lab.allocate(*weights, 512);
  seal_pages(lab.memory(), *model, {piece(block, 4 * kMiB), piece(small, 512)});
  EXPECT_DEATH(Lab::fill(block + 3 * kMiB, 8, 9), "");
  EXPECT_DEATH(Lab::fill(small, 8, 9), "");
}

}  // namespace
}  // namespace vmm::testing
