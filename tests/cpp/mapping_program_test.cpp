// Random programs of what maps memory: tensors whose pages come and go, blocks, explicit
// pages, aliases of them, seals, and memory over two devices; with held fences, tight limits
// and failing driver calls. A plain model knows which pattern each page shows, through which
// address it may be written, and who has to be refused. VMM_SEED and VMM_STEPS as for
// random_program_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/faces/seals.h"
#include "core/memory/read_only_ranges.h"
#include "cpp/mapping_lab.h"
#include "support/environment.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kModels = 3;

class MappingProgram {
 public:
  MappingProgram(std::uint64_t seed, bool with_failures) : random_(seed), with_failures_(with_failures) {
    for (std::size_t k = 0; k < kModels; ++k) {
      PoolSpec pool = Lab::spec("model " + std::to_string(k), limits_[k] * kPage);
      if (k == 1) pool.page_size = kPage;
      models_[k] = memory(k).create_pool(pool, nullptr);
      DeviceMemory::free(lab_.space, memory(k).allocate(*models_[k], kPage, nullptr));
    }
    empty_caches();
    reservations_ = lab_.driver.live_reservations();
  }

  void step() {
    if (with_failures_ && any(8) == 0) lab_.driver.fail_nth_call(1 + any(12), any(2) == 0 ? no_memory() : broken());
    using P = MappingProgram;
    using Step = void (P::*)();
    constexpr std::array<Step, 12> kSteps = {
        &P::make,       &P::write, &P::grow,   &P::put_back, &P::alias,           &P::drop_alias,
        &P::drop_thing, &P::seal,  &P::unseal, &P::limit,    &P::hold_or_release, &P::empty_caches};
    constexpr std::array<std::uint64_t, 12> kOf100 = {14, 16, 14, 12, 12, 6, 6, 8, 4, 3, 3, 2};
    std::size_t which = 0;
    for (std::uint64_t what = any(100); what >= kOf100[which];) what -= kOf100[which++];
    try {
      (this->*kSteps[which])();
    } catch (const VmmError& error) {
      EXPECT_NE(lab_.driver.failures(), 0U) << error.what();
    }
    lab_.driver.clear_failures();
    for (const auto& thing : things_) {
      if (thing->kind == Kind::zeros) thing->range->commit({}, nullptr);  // mends what a failure left
    }
    check();
  }

  // All that was made goes, in any order.
  void finish() {
    while (!aliases_.empty() || !things_.empty()) {
      any(2) == 0 ? drop_alias() : drop_thing();
      check();
    }
    lab_.driver.release_fences();
    for (int round = 0; round < 2; ++round) empty_caches();
    EXPECT_EQ(lab_.driver.live_chunks(), 0U);
    EXPECT_EQ(lab_.driver.live_mappings(), 0U);
    EXPECT_EQ(lab_.driver.live_reservations(), reservations_);
    EXPECT_EQ(lab_.memory().pools().size() + devices_.other().pools().size(), kModels) << "and no part of one";
  }

 private:
  std::uint64_t any(std::uint64_t below) { return random_() % below; }
  Stream a_stream() { return stream(0x10 * (1 + any(3))); }
  // The last model is the other device's.
  DeviceMemory& memory(std::size_t model) { return model + 1 == kModels ? devices_.other() : lab_.memory(); }

  // -- What is done, to the memory and to the model of it ----------------------------
  void make() {
    if (things_.size() >= 10) return;
    const auto thing = std::make_shared<Thing>();
    thing->kind = static_cast<Kind>(any(6));
    thing->model = any(kModels);
    const std::shared_ptr<Pool>& model = models_[thing->model];
    DeviceMemory& home = memory(thing->model);
    const std::size_t count = 1 + any(4);
    if (thing->kind <= Kind::zeros) {
      const bool is_elastic = thing->kind == Kind::elastic;
      thing->ahead = is_elastic ? any(160) * kPage : 0;  // the further behind, the larger its chunks
      thing->pages.resize(is_elastic ? 24 : 12);
      const TensorRangeSpec spec{"tensor", thing->ahead + thing->pages.size() * kPage, is_elastic ? 0 : kPage,
                                 thing->kind == Kind::zeros};
      thing->range = std::make_unique<TensorRange>(home, model, spec);
      thing->base = thing->range->base() + thing->ahead;
    } else if (thing->kind == Kind::placed) {
      std::vector<PlacedShare> shares;
      for (std::size_t k = 1 + any(3); k-- > 0;) {
        shares.push_back({models_[any(kModels)], (1 + any(3)) * kPage, a_stream()});
        const auto payer = std::find(models_.begin(), models_.end(), shares.back().pool) - models_.begin();
        add_fresh(thing.get(), static_cast<std::size_t>(payer), shares.back().size / kPage);
      }
      if (!finds(thing->pages, [&] { thing->placed = std::make_unique<PlacedMemory>(shares); })) return;
      thing->base = thing->placed->base();
    } else {
      const bool is_block = thing->kind == Kind::block;
      add_fresh(thing.get(), thing->model, count);
      if (!finds(thing->pages, [&] {
            thing->base = is_block ? home.allocate(*model, count * kPage, a_stream())
                                   : home.allocate_first(*model, count * kPage, a_stream());
          })) {
        return;
      }
      const Address base = thing->base;
      thing->end = [this, base, count, is_block, &home, pool = model.get()] {
        is_block ? static_cast<void>(DeviceMemory::free(lab_.space, base))
                 : home.deallocate_pages(*pool, base - pool->base(), count * kPage);
      };
      for (std::size_t k = 0; k < count; ++k) show(base + k * kPage, thing->pages[k].get(), ++last_seed_);
    }
    thing->sealed.resize(thing->pages.size());
    things_.push_back(thing);
  }

  void write() {
    if (!aliases_.empty() && any(2) == 0) {
      const Alias& from = aliases_[any(aliases_.size())];
      const std::size_t k = any(from.pages.size());
      if (!from.is_read_only) show(from.made->base() + k * kPage, from.pages[k].get(), ++last_seed_);
    } else if (const Part part = a_part(/*of_ranges=*/false); part.thing != nullptr) {
      for (std::size_t k = 0; k < part.count; ++k) {
        Page* const page = part.pages()[k].get();
        if (page != nullptr && part.sealed()[k] == 0) show(part.address() + k * kPage, page, ++last_seed_);
      }
    }
  }

  void grow() {
    const Part part = a_part(/*of_ranges=*/true);
    if (part.thing == nullptr) return;
    Pages wanted;
    for (const auto& page : part.pages()) {
      if (page == nullptr) wanted.push_back(std::make_shared<Page>(Page{part.thing->model}));
    }
    if (!finds(wanted, [&] { part.thing->range->commit({part.range()}, a_stream()); })) return;
    for (auto& page : part.pages()) {
      if (page != nullptr) continue;
      page = wanted.back();
      wanted.pop_back();
    }
  }

  // Stretch by stretch, up to one that an alias shows; nothing where any is sealed.
  void put_back() {
    const Part part = a_part(/*of_ranges=*/true);
    if (part.thing == nullptr) return;
    const auto pages = part.pages();
    bool is_fine = std::count(part.sealed().begin(), part.sealed().end(), 1) == 0;
    Pages after(pages.begin(), pages.end());
    const std::size_t had = count(after, part.thing->model);
    for (std::size_t k = 0, next = 0; k < part.count && is_fine; k = next + 1) {
      for (next = k; next < part.count && pages[next] != nullptr;) ++next;
      is_fine = !is_shown(pages.subspan(k, next - k));
      for (; k < next && is_fine; ++k) after[k] = nullptr;
    }
    const bool is_whole =
        is_done(is_fine, [&] { EXPECT_EQ(part.thing->range->decommit({part.range()}), had * kPage); });
    for (std::size_t k = 0; k < part.count; ++k) {
      // A failing call leaves what it had not come to.
      if (is_whole || lab_.driver.failures() == 0 || !part.thing->is_committed(part.first + k)) pages[k] = after[k];
    }
  }

  void alias() {
    if (aliases_.size() >= 6) return;
    Alias made;
    made.is_read_only = any(2) == 0;
    made.opener = any(kModels);
    std::vector<AliasedPiece> pieces;
    Pages once;
    std::set<const void*> of_others;
    bool is_fine = true;
    for (std::size_t k = 1 + any(3) / 2; k-- > 0;) {
      const Part part = a_part(/*of_ranges=*/false);
      if (part.thing == nullptr) return;
      pieces.push_back({part.address(), part.size()});
      is_fine &= &memory(part.thing->model) == &memory(made.opener) && is_whole(part);
      if (part.thing->model != made.opener) {
        for (const auto& page : part.pages()) of_others.insert(page.get());
      }
      if (part.thing->kind == Kind::block) made.keeps.push_back(part.thing);
      once.insert(once.end(), part.pages().begin(), part.pages().end());
    }
    if (any(10) == 0 && !aliases_.empty()) {
      pieces.push_back({aliases_[any(aliases_.size())].made->base(), kPage});
      is_fine = false;
    }
    DeviceMemory& home = memory(made.opener);
    const std::size_t copies = 1 + any(3);
    if (!is_done(is_fine, [&] {
          made.made = std::make_unique<TensorAlias>(home, models_[made.opener], pieces, copies, made.is_read_only);
        })) {
      return;
    }
    for (std::size_t k = 0; k < copies; ++k) made.pages.insert(made.pages.end(), once.begin(), once.end());
    for (const auto& page : made.pages) ++page->aliases;
    made.of_others = of_others.size() * kPage;
    aliases_.push_back(std::move(made));
  }
  void drop_alias() {
    if (aliases_.empty()) return;
    std::swap(aliases_[any(aliases_.size())], aliases_.back());
    for (const auto& page : aliases_.back().pages) --page->aliases;
    aliases_.pop_back();
  }
  void drop_thing() {
    if (things_.empty()) return;
    std::swap(things_[any(things_.size())], things_.back());
    if (const Thing& thing = *things_.back(); thing.kind == Kind::pages && is_shown(thing.pages)) {
      EXPECT_THROW(thing.end(), StillInUseError);
    } else {
      things_.pop_back();
    }
  }

  void seal() { change_seals(true); }
  void unseal() { change_seals(false); }
  // All or none, of one thing or of two of a model.
  void change_seals(bool seals) {
    std::vector<Part> parts = {a_part(/*of_ranges=*/any(5) != 0)};
    if (parts[0].thing == nullptr) return;
    const std::size_t model = parts[0].thing->model;
    for (int tries = 0; tries < 3 && seals && parts.size() == 1; ++tries) {
      const Part more = a_part(/*of_ranges=*/true);
      if (more.thing == nullptr || more.thing == parts[0].thing) continue;
      if (more.thing->model == model || any(8) == 0) parts.push_back(more);
    }
    std::vector<SealedPiece> pieces;
    bool is_fine = true;
    for (const Part& part : parts) {
      pieces.push_back({part.address(), part.size()});
      const auto sealed = part.sealed();
      const bool is_sealed = std::count(sealed.begin(), sealed.end(), 1) == std::ssize(sealed);
      is_fine &= part.thing->range != nullptr && part.thing->model == model && ((seals && is_sealed) || is_whole(part));
    }
    if (with_failures_ && any(2) == 0) lab_.driver.fail_nth(Call::set_access, parts.size(), broken());
    if (!is_done(is_fine, [&] { (seals ? seal_pages : unseal_pages)(memory(model), *models_[model], pieces); })) return;
    for (const Part& part : parts) std::fill(part.sealed().begin(), part.sealed().end(), seals ? 1 : 0);
  }

  void limit() {
    const std::size_t k = any(kModels);
    limits_[k] = 8 + any(30);
    memory(k).set_limit(models_[k]->budget(), limits_[k] * kPage);
  }
  void hold_or_release() { any(2) == 0 ? lab_.driver.hold_fences(a_stream()) : lab_.driver.release_fences(); }
  void empty_caches() { devices_.empty_caches(); }

  // -- What the steps ask -------------------------------------------------------------
  // Rather of what has memory; nullptr: nothing of the kind is there.
  Part a_part(bool of_ranges) {
    Part part;
    for (int tries = 0; tries < 8 && part.thing == nullptr && !things_.empty(); ++tries) {
      const auto& thing = things_[any(things_.size())];
      if (thing->range != nullptr || !of_ranges) part.thing = thing;
    }
    if (part.thing == nullptr) return part;
    const Pages& pages = part.thing->pages;
    part.first = any(3) == 0 ? 0 : any(pages.size());
    part.count = 1 + any(std::min<std::size_t>(pages.size() - part.first, 20));
    if (any(4) == 0) return part;
    while (part.first + 1 < pages.size() && pages[part.first] == nullptr) ++part.first;
    const auto end = [&] { return part.first + part.count; };
    for (part.count = 1; end() < pages.size() && pages[end()] != nullptr && any(8) != 0;) ++part.count;
    return part;
  }
  // Whether all of it has memory, in chunks of which nothing else is.
  bool is_whole(const Part& part) {
    const auto pages = part.pages();
    if (part.thing->kind == Kind::placed || std::count(pages.begin(), pages.end(), nullptr) != 0) return false;
    const auto chunks = memory(part.thing->model).pool_at(part.address())->chunks_under(part.address(), part.size());
    return chunks.front().address == part.address() &&
           chunks.back().address + chunks.back().size == part.address() + part.size();
  }
  // Whether `work` was done; it has to be refused unless `is_fine`.
  template <typename Work>
  bool is_done(bool is_fine, const Work& work) {
    try {
      work();
      EXPECT_TRUE(is_fine) << "not refused";
      return true;
    } catch (const VmmError& error) {
      if (lab_.driver.failures() == 0) {
        EXPECT_FALSE(is_fine) << error.what();
      }
      return false;
    }
  }
  // Whether `work` found the memory of so many pages: only a limit may refuse it.
  template <typename Work>
  bool finds(const Pages& wanted, const Work& work) {
    try {
      work();
      return true;
    } catch (const OutOfMemoryError& error) {
      if (lab_.driver.failures() != 0) throw;
      bool is_above = false;
      for (std::size_t k = 0; k < kModels; ++k) {
        const std::size_t stranded = memory(k).memory_stats_of(*models_[k]).stranded_bytes / kPage;
        is_above |= count(wanted, k) + held(k) + stranded > limits_[k];
      }
      EXPECT_TRUE(is_above) << error.what();
      return false;
    }
  }
  // What a model has to pay for.
  std::size_t held(std::size_t model) {
    std::set<std::shared_ptr<Page>> found;
    for (const auto& thing : things_) found.insert(thing->pages.begin(), thing->pages.end());
    for (const Alias& alias : aliases_) {
      found.insert(alias.pages.begin(), alias.pages.end());
      for (const auto& kept : alias.keeps) found.insert(kept->pages.begin(), kept->pages.end());
    }
    return count({found.begin(), found.end()}, model);
  }

  void check() {
    devices_.check();  // their pools too
    ASSERT_EQ(lab_.driver.live_chunk_bytes(), lab_.memory().committed_bytes() + devices_.other().committed_bytes());
    for (const auto& thing : things_) {
      for (std::size_t k = 0; k < thing->pages.size(); ++k) {
        const Address at = thing->base + k * kPage;
        const bool has_memory = thing->pages[k] != nullptr;
        if (thing->range != nullptr) {
          ASSERT_EQ(thing->is_committed(k), has_memory) << k;
          if (has_memory) {
            ASSERT_EQ(thing->range->part()->is_read_only(at, kPage), thing->sealed[k] != 0) << k;
          }
        }
        if (!has_memory && thing->kind != Kind::zeros) continue;
        ASSERT_TRUE(shows(at, thing->pages[k].get())) << "page " << k << " of kind " << static_cast<int>(thing->kind);
        if (any(8) == 0) {
          ASSERT_EQ(rights_.is_writable(at), has_memory && thing->sealed[k] == 0) << k;
        }
      }
    }
    std::array<std::size_t, kModels> of_others{};
    for (const Alias& alias : aliases_) {
      of_others[alias.opener] += alias.of_others;
      const Address base = alias.made->base();
      ASSERT_EQ(alias.made->size(), alias.pages.size() * kPage);
      for (std::size_t k = 0; k < alias.pages.size(); ++k) {
        ASSERT_TRUE(shows(base + k * kPage, alias.pages[k].get())) << "page " << k << " of an alias";
      }
      ASSERT_EQ(rights_.is_writable(base + any(alias.pages.size()) * kPage), !alias.is_read_only);
      ASSERT_EQ(ReadOnlyRanges::of_process().holds_now(base), alias.is_read_only);
    }
    for (std::size_t k = 0; k < kModels; ++k) {
      ASSERT_EQ(memory(k).shared_bytes_of(*models_[k]), of_others[k]);
      ASSERT_GE(models_[k]->budget().used(), held(k) * kPage);
    }
  }

  TwoDevices devices_;
  Lab& lab_ = devices_.lab;
  Rights rights_;
  std::mt19937_64 random_;
  const bool with_failures_;
  std::array<std::size_t, kModels> limits_ = {32, 32, 32};  // pages
  std::array<std::shared_ptr<Pool>, kModels> models_;
  std::size_t reservations_ = 0;  // of the models alone
  std::vector<std::shared_ptr<Thing>> things_;
  std::vector<Alias> aliases_;
  std::uint64_t last_seed_ = 0;
};

void run(std::uint64_t seed, std::uint64_t steps, bool with_failures) {
  MappingProgram program(seed, with_failures);
  for (std::uint64_t step = 0; step < steps; ++step) {
    SCOPED_TRACE("VMM_SEED=" + std::to_string(seed) + ", step " + std::to_string(step));
    program.step();
    if (::testing::Test::HasFailure()) return;
  }
  SCOPED_TRACE("VMM_SEED=" + std::to_string(seed) + ", the end");
  program.finish();
}

TEST(MappingPrograms, OnFixedSeeds) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) run(seed, 300, seed % 2 == 0);
}

TEST(MappingPrograms, OnAFreshSeed) {
  const std::uint64_t seed = from_environment("VMM_SEED", std::random_device()());
  run(seed, from_environment("VMM_STEPS", 500), false);
  run(seed, from_environment("VMM_STEPS", 500), true);
}

}  // namespace
}  // namespace vmm::testing
