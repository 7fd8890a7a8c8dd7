// Memory at further addresses, and pages that nobody may write to.
#include "core/faces/tensor_alias.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/faces/seals.h"
#include "core/faces/tensor_range.h"
#include "core/memory/read_only_ranges.h"
#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

TensorRangeSpec aligned(std::size_t bytes) { return {"aligned tensor", bytes, 0}; }

struct Source {
  explicit Source(Lab& lab, const std::shared_ptr<Pool>& model, std::size_t bytes, std::uint64_t seed)
      : range(std::make_unique<TensorRange>(lab.memory(), model, aligned(bytes))) {
    range->commit({{0, bytes}}, kOne);
    Lab::fill(range->base(), bytes, seed);
  }
  std::unique_ptr<TensorRange> range;
};

TEST(TensorAlias, ARingsEndContinuesAtItsBeginning) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source ring(lab, model, 40 * kMiB, 1);
  const std::size_t used = model->budget().used();
  {
    TensorAlias twice(lab.memory(), model, {{ring.range->base(), 40 * kMiB}}, 2, false);
    EXPECT_EQ(twice.size(), 80 * kMiB);
    EXPECT_TRUE(Lab::holds(twice.base(), 40 * kMiB, 1));
    EXPECT_TRUE(Lab::holds(twice.base() + 40 * kMiB, 40 * kMiB, 1));
    Lab::fill(twice.base() + 30 * kMiB, 20 * kMiB, 2);  // over the end
    EXPECT_TRUE(Lab::holds(twice.base() + 30 * kMiB, 20 * kMiB, 2));
    EXPECT_EQ(model->budget().used(), used) << "counted once";
    EXPECT_EQ(lab.memory().shared_bytes_of(*model), 0U) << "its own";
    lab.memory().check();
  }
  lab.memory().check();
}

TEST(TensorAlias, MoreCopiesThanThereAreAddressesAreNamed) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source source(lab, model, kPage, 1);
  const std::vector<AliasedPiece> piece = {{source.range->base(), kPage}};
  for (const std::size_t copies : {(std::size_t{1} << 31U) - 1, std::size_t{1} << 31U, (std::size_t{1} << 32U) + 1,
                                   std::size_t{1} << 62U, kUnlimited}) {
    EXPECT_THROW(TensorAlias(lab.memory(), model, piece, copies, false), OutOfMemoryError) << copies;
  }
  EXPECT_EQ(lab.driver.count(Call::map), 1U) << "of the tensor itself";
  EXPECT_EQ(lab.memory().shared_bytes_of(*model), 0U);
}

TEST(TensorAlias, StitchesPieces) {
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  const Source first(lab, a, 6 * kMiB, 1);
  const Source second(lab, b, 4 * kMiB, 2);
  TensorAlias both(lab.memory(), a, {{first.range->base(), 6 * kMiB}, {second.range->base(), 4 * kMiB}}, 1, false);
  EXPECT_TRUE(Lab::holds(both.base(), 6 * kMiB, 1));
  EXPECT_TRUE(Lab::holds(both.base() + 6 * kMiB, 4 * kMiB, 2));
  EXPECT_EQ(lab.memory().shared_bytes_of(*a), 4 * kMiB) << "of the other's";
  EXPECT_EQ(lab.memory().shared_bytes_of(*b), 0U);
}

TEST(TensorAlias, HoldsWhatItShows) {
  Lab lab;
  const auto model = lab.pool("a");
  Source source(lab, model, 8 * kMiB, 3);
  auto alias = std::make_unique<TensorAlias>(lab.memory(), model,
                                             std::vector<AliasedPiece>{{source.range->base(), 8 * kMiB}}, 1, false);
  EXPECT_THROW(source.range->decommit({{0, 2 * kMiB}}), StillInUseError);
  source.range.reset();
  EXPECT_TRUE(Lab::holds(alias->base(), 8 * kMiB, 3));
  EXPECT_EQ(model->budget().used(), 8 * kMiB);
  lab.meet(kTwo);
  lab.driver.hold_fences(kTwo);
  lab.driver.clear_calls();
  alias.reset();
  EXPECT_EQ(lab.driver.count(Call::unmap) + lab.driver.count(Call::wait), 0U) << "a reader still uses the addresses";
  lab.driver.release_fences();
  lab.memory().empty_cache();
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  EXPECT_EQ(lab.memory().pools().size(), 1U);
}

// Of a model's own block: its stream may have it again at once, but for what was recorded.
TEST(TensorAlias, AStreamThatUsesItsAddressesIsRecordedWithWhatItShows) {
  Lab lab;
  const auto model = lab.pool("a");
  const Address block = lab.allocate(*model, 8 * kMiB, kOne);
  const std::vector<AliasedPiece> pieces = {{block, 8 * kMiB}};
  auto alias = std::make_unique<TensorAlias>(lab.memory(), model, pieces, 1, false);
  const Address base = alias->base();
  const SecondMappings& all = lab.memory().second_mappings();
  EXPECT_EQ(all.at(base - 1), nullptr);
  EXPECT_EQ(all.at(base + 8 * kMiB), nullptr);
  ASSERT_EQ(all.at(base + 8 * kMiB - 1), alias.get());
  lab.driver.hold_fences(kTwo);
  all.at(base)->record_stream(kTwo, lab.memory().streams());
  alias.reset();
  EXPECT_EQ(all.at(base), nullptr);
  lab.free(block);
  const Address next = lab.allocate(*model, 8 * kMiB, kOne);
  EXPECT_NE(next, block) << "the other stream may still read it";
  lab.free(next);
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  lab.memory().check();
}

TEST(TensorAlias, WhoIsLetInLaterReachesItToo) {
  Lab lab;
  const auto model = lab.pool("a");
  Source source(lab, model, 8 * kMiB, 3);
  const std::vector<AliasedPiece> pieces = {{source.range->base(), 8 * kMiB}};
  const TensorAlias alias(lab.memory(), model, pieces, 2, false);
  const TensorAlias read_only(lab.memory(), model, pieces, 1, true);
  TensorRangeSpec sparse = aligned(64 * kMiB);
  sparse.page_size = kPage;
  sparse.zeros = true;
  TensorRange zeros(lab.memory(), model, sparse);
  zeros.commit({{8 * kMiB, 8 * kMiB}}, kOne);
  const Location who = Location::on_host();
  std::uint64_t its_number = 0;
  const auto granted = [&](Address address, Access access) {
    const auto calls = lab.driver.calls(Call::set_access);
    return std::any_of(calls.begin(), calls.end(), [&](const CallRecord& call) {
      return call.a <= address && address < call.a + call.b &&
             call.c == (its_number << 8U | static_cast<std::uint64_t>(access));
    });
  };
  lab.driver.clear_calls();
  ASSERT_TRUE(lab.memory().add_accessor(who).ok());
  its_number = lab.driver.calls(Call::set_access).front().c >> 8U;
  EXPECT_TRUE(granted(alias.base() + 12 * kMiB, Access::read_write));
  EXPECT_TRUE(granted(read_only.base(), Access::read));
  EXPECT_TRUE(granted(zeros.base(), Access::read));
  EXPECT_TRUE(granted(zeros.base() + 32 * kMiB, Access::read));
  lab.driver.clear_calls();
  zeros.decommit({{8 * kMiB, 8 * kMiB}});
  EXPECT_TRUE(granted(zeros.base() + 8 * kMiB, Access::read)) << "what comes to read as zero afterwards";
}

TEST(TensorAlias, AStreamThatNobodyKnewIsMetWhereItUsesPages) {
  Lab lab;
  const auto model = lab.pool("a");
  Source source(lab, model, 8 * kMiB, 3);
  const std::vector<AliasedPiece> pieces = {{source.range->base(), 8 * kMiB}};
  auto alias = std::make_unique<TensorAlias>(lab.memory(), model, pieces, 1, false);
  alias->record_stream(kTwo, lab.memory().streams());
  lab.driver.hold_fences(kTwo);
  source.range.reset();
  lab.driver.clear_calls();
  alias.reset();
  EXPECT_EQ(lab.driver.count(Call::unmap) + lab.driver.count(Call::wait), 0U) << "it may read there";
  lab.driver.release_fences();
  lab.memory().empty_cache();
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
}

TEST(TensorAlias, OneThatNobodyMayWriteToIsKnownByItsAddressesWhileItLives) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source source(lab, model, 4 * kMiB, 3);
  const std::vector<AliasedPiece> pieces = {{source.range->base(), 4 * kMiB}};
  const auto is_known = [](Address address) { return ReadOnlyRanges::of_process().holds_now(address); };
  const TensorAlias writable(lab.memory(), model, pieces, 1, /*read_only=*/false);
  EXPECT_FALSE(is_known(writable.base()));
  auto alias = std::make_unique<TensorAlias>(lab.memory(), model, pieces, 2, /*read_only=*/true);
  const Address base = alias->base();
  EXPECT_TRUE(is_known(base) && is_known(base + 8 * kMiB - 1));
  EXPECT_FALSE(is_known(base - 1) || is_known(base + 8 * kMiB));
  lab.meet(kTwo);
  lab.driver.hold_fences(kTwo);  // a reader
  alias.reset();
  EXPECT_TRUE(is_known(base)) << "it is mapped still";
  lab.driver.release_fences();
  lab.memory().empty_cache();
  EXPECT_FALSE(is_known(base));
  for (const Call call : {Call::map, Call::set_access}) {
    lab.driver.fail_nth(call, 1, broken());
    EXPECT_THROW(TensorAlias(lab.memory(), model, pieces, 2, /*read_only=*/true), VmmError);
    lab.driver.clear_failures();
    EXPECT_FALSE(is_known(base));
  }
}

TEST(TensorAlias, WhatItShowsTwiceIsSharedOnce) {
  Lab lab;
  const auto owner = lab.pool("owner");
  const auto other = lab.pool("other");
  const Source source(lab, owner, 4 * kMiB, 1);
  const AliasedPiece piece{source.range->base(), 4 * kMiB};
  const TensorAlias twice(lab.memory(), other, {piece, piece}, 1, false);
  EXPECT_EQ(lab.memory().shared_bytes_of(*other), 4 * kMiB);
}

TEST(TensorAlias, OfWhatHasPagesInPartsIsRefusedByItsName) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRangeSpec spec = aligned(16 * kMiB);
  spec.page_size = kPage;
  TensorRange range(lab.memory(), model, spec);
  range.commit({{0, 4 * kMiB}}, kOne);
  try {
    const TensorAlias alias(lab.memory(), model, {{range.base(), 16 * kMiB}}, 1, false);
    ADD_FAILURE() << "12 MiB are not there";
  } catch (const InvalidArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("not all is there"), std::string::npos) << error.what();
  }
  range.decommit({{0, 4 * kMiB}});  // nobody holds them
}

// torch may free it by its own deleter, which an alias replaces (cudagraph trees).
TEST(TensorAlias, OfAPrivatePoolIsRefused) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto part = lab.memory().create_part(model, {1, 0}, /*no_split=*/false);
  const Address block = lab.allocate(*part, 8 * kMiB, kOne);
  EXPECT_THROW(TensorAlias(lab.memory(), model, {{block, 8 * kMiB}}, 1, false), InvalidArgumentError);
  lab.free(block);
}

TEST(TensorAlias, WantsWholeChunksOfAPool) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source source(lab, model, 8 * kMiB, 3);
  const Address base = source.range->base();
  for (const AliasedPiece& piece :
       {AliasedPiece{base, 3 * kMiB}, AliasedPiece{base + 512, 2 * kMiB}, AliasedPiece{base, 16 * kMiB},
        AliasedPiece{base + 8 * kMiB, 2 * kMiB}, AliasedPiece{lab.allocate(*model, 512), 512}, AliasedPiece{8, 8}}) {
    EXPECT_THROW(TensorAlias(lab.memory(), model, {piece}, 2, false), VmmError) << piece.size;
  }
  EXPECT_EQ(source.range->decommit({{0, 8 * kMiB}}), 8 * kMiB) << "what was refused holds nothing";
}

TEST(TensorAlias, AFailedOneLeavesNoTrace) {
  for (std::uint64_t n = 1;; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    Lab lab;
    const auto model = lab.pool("a");
    const Source source(lab, model, 6 * kMiB, 4);
    lab.driver.fail_nth_call(lab.driver.count() + n, broken());
    std::unique_ptr<TensorAlias> alias;
    bool failed = false;
    try {
      alias = std::make_unique<TensorAlias>(lab.memory(), model,
                                            std::vector<AliasedPiece>{{source.range->base(), 6 * kMiB}}, 3, false);
    } catch (const VmmError&) {
      failed = true;
    }
    alias.reset();
    const bool none = !failed && lab.driver.failures() == 0;
    lab.driver.clear_failures();
    EXPECT_TRUE(Lab::holds(source.range->base(), 6 * kMiB, 4));
    EXPECT_EQ(source.range->decommit({{0, 6 * kMiB}}), 6 * kMiB);
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
    if (none) {
      EXPECT_GT(n, 10U);
      break;
    }
  }
}

// Each allocation of the host's in turn.
TEST(TensorAlias, OneThatTheHostHasNoMemoryForLeavesNoTrace) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    const auto model = lab.pool("a");
    const auto other = lab.pool("b");
    auto source = std::make_unique<Source>(lab, other, 6 * kMiB, 1);
    const std::vector<AliasedPiece> pieces = {{source->range->base(), 6 * kMiB}};
    std::unique_ptr<TensorAlias> alias;
    const bool ran_out = runs_out_at(
        nth, [&] { alias = std::make_unique<TensorAlias>(lab.memory(), model, pieces, 3, /*read_only=*/true); });
    failed = failures_made != 0;
    if (ran_out) {
      EXPECT_EQ(lab.memory().shared_bytes_of(*model), 0U);
      EXPECT_EQ(source->range->decommit({{0, 6 * kMiB}}), 6 * kMiB) << "nobody shows it";
    }
    alias.reset();
    source.reset();
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  }
}

TEST(TensorAlias, EndsWhereTheHostHasNoMemory) {
  // The first ones: what the clock lacks, half-way, costs a fence.
  for (long nth = 0; nth < 5; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    const auto model = lab.pool("a");
    auto source = std::make_unique<Source>(lab, model, 6 * kMiB, 1);
    const std::vector<AliasedPiece> pieces = {{source->range->base(), 6 * kMiB}};
    auto alias = std::make_unique<TensorAlias>(lab.memory(), model, pieces, 2, /*read_only=*/false);
    EXPECT_TRUE(reaches(nth, [&] { alias.reset(); }));
    source.reset();
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  }
}

TEST(Seals, WaitForWritersAndAreAllOrNone) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto other = lab.pool("b");
  const Source one(lab, model, 5 * kMiB, 1);
  const Source two(lab, model, 4 * kMiB, 2);
  const std::vector<SealedPiece> both = {{one.range->base(), 5 * kMiB}, {two.range->base(), 4 * kMiB}};
  const auto sealed = [&](const Source& source, std::size_t bytes) {
    return source.range->part()->is_read_only(source.range->base(), bytes);
  };
  EXPECT_THROW(seal_pages(lab.memory(), *other, both), InvalidArgumentError);
  EXPECT_THROW(
      seal_pages(lab.memory(), *model, {both[0], {two.range->base(), 1 * kMiB + 512}, {two.range->base(), 8 * kMiB}}),
      InvalidArgumentError);
  EXPECT_FALSE(sealed(one, 5 * kMiB));
  lab.driver.fail_nth(Call::set_access, 2, broken());
  EXPECT_THROW(seal_pages(lab.memory(), *model, both), VmmError);
  lab.driver.clear_failures();
  EXPECT_FALSE(sealed(one, 5 * kMiB));
  lab.meet(kTwo);
  lab.driver.hold_fences(kTwo);
  lab.driver.clear_calls();
  seal_pages(lab.memory(), *model, both);
  EXPECT_GT(lab.driver.count(Call::wait), 0U) << "a writer was queued";
  EXPECT_TRUE(sealed(one, 5 * kMiB) && sealed(two, 4 * kMiB));
  EXPECT_TRUE(Lab::holds(two.range->base(), 4 * kMiB, 2));
  TensorAlias writable(lab.memory(), model, {{two.range->base(), 4 * kMiB}}, 1,
                       false);  // another address has rights of its own
  Lab::fill(writable.base(), 4 * kMiB, 7);
  EXPECT_TRUE(Lab::holds(two.range->base(), 4 * kMiB, 7));
  unseal_pages(lab.memory(), *model, both);
  Lab::fill(one.range->base(), 5 * kMiB, 8);
  EXPECT_FALSE(sealed(one, 5 * kMiB));
}

// Each call in turn: what was sealed before stays so, and nothing else is, for any device.
TEST(Seals, AFailedOneChangesNothing) {
  for (std::size_t nth = 1; nth <= 4; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    LabSpec spec;
    spec.device_count = 2;
    Lab lab(spec);
    const auto model = lab.pool("a");
    ASSERT_TRUE(lab.memory().add_accessor(Location::on_device(1)).ok());
    const Source one(lab, model, 8 * kMiB, 1);
    const Source two(lab, model, 4 * kMiB, 2);
    const Pool& part = *one.range->part();
    seal_pages(lab.memory(), *model, {{one.range->base() + 4 * kMiB, 4 * kMiB}});
    lab.driver.clear_calls();
    lab.driver.fail_nth(Call::set_access, nth, broken());
    EXPECT_THROW(seal_pages(lab.memory(), *model, {{one.range->base(), 8 * kMiB}, {two.range->base(), 4 * kMiB}}),
                 VmmError);
    lab.driver.clear_failures();
    EXPECT_EQ(lab.driver.count(Call::set_access), 2 * nth) << "each undone, the failed one too";
    EXPECT_TRUE(part.is_read_only(one.range->base() + 4 * kMiB, 4 * kMiB));
    EXPECT_FALSE(part.has_read_only(one.range->base(), 4 * kMiB));
    Lab::fill(one.range->base(), 4 * kMiB, 3);
    Lab::fill(two.range->base(), 4 * kMiB, 4);
  }
}

TEST(Seals, ARefusedOneChangesNothing) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source one(lab, model, 8 * kMiB, 1);
  const Source two(lab, model, 4 * kMiB, 2);
  seal_pages(lab.memory(), *model, {{one.range->base() + 4 * kMiB, 4 * kMiB}});
  lab.driver.clear_calls();
  EXPECT_THROW(seal_pages(lab.memory(), *model, {{one.range->base(), 8 * kMiB}, {two.range->base(), 8 * kMiB}}),
               InvalidArgumentError);
  EXPECT_EQ(lab.driver.count(Call::set_access), 0U);
  EXPECT_TRUE(one.range->part()->is_read_only(one.range->base() + 4 * kMiB, 4 * kMiB));
}

// What lives in a chunk and is not given would fault where nobody expects it.
TEST(Seals, NoNeighbourIsSealedWithASlice) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source source(lab, model, 256 * kMiB, 1);
  const Pool& part = *source.range->part();
  const Address base = source.range->base();
  const std::size_t chunk = part.chunks_under(base + 128 * kMiB, 1).front().size;
  const Address at = part.chunks_under(base + 128 * kMiB, 1).front().address;
  for (const SealedPiece& slice : {SealedPiece{at, 512, false}, SealedPiece{at, chunk - 1, false},
                                   SealedPiece{at + 512, chunk - 512, false}, SealedPiece{at, chunk + 512, false}}) {
    EXPECT_THROW(seal_pages(lab.memory(), *model, {slice}), InvalidArgumentError);
    EXPECT_FALSE(part.has_read_only(base, 256 * kMiB));
  }
  seal_pages(lab.memory(), *model, {{at + 512, chunk - 512, false}, {at, 512, false}});
  EXPECT_TRUE(part.is_read_only(at, chunk));
  EXPECT_FALSE(part.is_read_only(at, chunk + 1));
  // Pages that it gave back in a chunk that stays can be its again.
  unseal_pages(lab.memory(), *model, {{at, chunk, false}});
  const std::size_t kept = align_up(at - base + chunk / 2, part.page_size());
  ASSERT_LT(kept, at - base + chunk) << "the chunk has pages beyond";
  source.range->decommit({{kept, 256 * kMiB - kept}});
  EXPECT_THROW(seal_pages(lab.memory(), *model, {{base, kept}}), InvalidArgumentError);
  // Nor are they sealed with it where they are given: it has not got them.
  EXPECT_THROW(seal_pages(lab.memory(), *model, {{base, at + chunk - base}}), InvalidArgumentError);
  EXPECT_THROW(seal_pages(lab.memory(), *model, {{base + kept, at + chunk - base - kept}}), InvalidArgumentError);
  source.range->commit({{0, 256 * kMiB}}, kOne);
  Lab::fill(base, 256 * kMiB, 2);
}

// A chunk that kept a page would serve its next ones read-only.
TEST(Seals, SealedPagesAreNotGivenBack) {
  Lab lab;
  const auto model = lab.pool("a");
  const std::size_t size = 256 * kMiB;
  const Source source(lab, model, size, 1);
  TensorRange& range = *source.range;
  const std::vector<SealedPiece> tail = {{range.base() + 32 * kMiB, size - 32 * kMiB}};
  seal_pages(lab.memory(), *model, tail);
  EXPECT_THROW(range.decommit({{0, kPage}, {129 * kMiB, size - 129 * kMiB}}), InvalidArgumentError);
  EXPECT_TRUE(range.is_committed({{0, size}}));
  EXPECT_EQ(range.decommit({{0, kPage}}), kPage);
  unseal_pages(lab.memory(), *model, tail);
  EXPECT_GT(range.decommit({{129 * kMiB, size - 129 * kMiB}}), 0U);
  range.commit({{0, size}}, kOne);
  Lab::fill(range.base(), size, 2);
}

TEST(Seals, DieWithTheirTensor) {
  Lab lab;
  const auto model = lab.pool("a", 8 * kMiB);
  {
    const Source source(lab, model, 8 * kMiB, 1);
    seal_pages(lab.memory(), *model, {{source.range->base(), 8 * kMiB}});
  }
  const Source next(lab, model, 8 * kMiB, 2);  // the same memory, writable
  EXPECT_TRUE(Lab::holds(next.range->base(), 8 * kMiB, 2));
}

TEST(SealsDeathTest, AWriteFaults) {
  Lab lab;
  const auto model = lab.pool("a");
  const Source source(lab, model, 4 * kMiB, 1);
  seal_pages(lab.memory(), *model, {{source.range->base(), 4 * kMiB}});
  EXPECT_DEATH(Lab::fill(source.range->base() + 2 * kMiB, 8, 9), "");
  TensorAlias reader(lab.memory(), model, {{source.range->base(), 4 * kMiB}}, 1, /*read_only=*/true);
  unseal_pages(lab.memory(), *model, {{source.range->base(), 4 * kMiB}});
  EXPECT_DEATH(Lab::fill(reader.base(), 8, 9), "");
  Lab::fill(source.range->base(), 4 * kMiB, 9);  // the owner writes
  EXPECT_TRUE(Lab::holds(reader.base(), 4 * kMiB, 9));
}

}  // namespace
}  // namespace vmm::testing
