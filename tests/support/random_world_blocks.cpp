// RandomWorld: blocks, explicit pages, threads.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "support/random_world.h"

namespace vmm::testing {

namespace {
constexpr std::size_t kMostLive = 200;
}  // namespace

void RandomWorld::allocate(std::size_t pool, std::size_t bytes, Stream stream, std::uint64_t failures) {
  if (live_.size() >= kMostLive) return;
  Live live{pool, 0, bytes, ++last_id_, nullptr};
  try {
    live.address = memory_->allocate(*pools_[pool], bytes, stream);
  } catch (const OutOfMemoryError& error) {
    const std::size_t beside = memory_->debug_log() == nullptr ? 0 : 2 * kPatternBytes;
    const std::size_t need = std::max<std::size_t>(align_up(bytes, kBlockAlignment) + beside, 2 * kMiB);
    judge_refusal(pool, align_up(need, pools_[pool]->page_size()), error, failures);
    return;
  } catch (const DriverError&) {
    require(driver_.failures() != failures, "a driver error without a failing call");
    return;
  } catch (const AsleepError&) {
    require(is_any_asleep(model_of(pool)), "one that is awake says that it sleeps");
    return;
  }
  live.home = memory_->pool_at(live.address);
  if (live.home != nullptr && live.home->is_spill()) ++counts_.spilled;
  require(is_aligned(live.address, 512), "unaligned");
  require(live.home != nullptr && &live.home->model() == &pools_[pool]->model(), "outside its model");
  require(live.home == pools_[pool] || live.home->is_spill() || live.home->tag() == pools_[pool]->tag(),
          "outside its pool");
  const std::size_t size = align_up(bytes, 512);
  for (const Live& other : live_) {
    require(live.address + size <= other.address || other.address + align_up(other.size, 512) <= live.address,
            [&] { return "block " + std::to_string(live.id) + " overlaps " + std::to_string(other.id); });
  }
  check_no_former_owner(*live.home, live.address, extent(bytes));
  write(live);
  live_.push_back(live);
}

void RandomWorld::free_live(std::size_t index) {
  check_if_awake(live_[index]);
  require(DeviceMemory::free(space_, live_[index].address), "a live block is unknown");
  require(!DeviceMemory::free(space_, live_[index].address), "freed twice");
  live_[index] = live_.back();
  live_.pop_back();
}

bool RandomWorld::pages_used(std::size_t pool, std::size_t offset, std::size_t size) const {
  const Address begin = pools_[pool]->base() + offset;
  for (const Live& live : live_) {
    if (live.pool == pool && live.address < begin + size && begin < live.address + align_up(live.size, 512))
      return true;
  }
  return std::any_of(page_ranges_.begin(), page_ranges_.end(), [&](const Pages& range) {
    return range.pool == pool && range.offset < offset + size && offset < range.offset + range.size;
  });
}

void RandomWorld::take_pages(std::size_t pool, std::size_t offset, std::size_t size) {
  require(!pages_used(pool, offset, size), "pages given out that are in use");
  require(pools_[pool]->is_mapped(offset, size), "pages not mapped after allocate");
  check_no_former_owner(*pools_[pool], pools_[pool]->base() + offset, size);
  const Pages range{pool, offset, size, ++last_id_};
  write(as_block(range));
  page_ranges_.push_back(range);
}

template <typename Request>
void RandomWorld::request_pages(std::size_t pool, std::size_t size, std::uint64_t failures, const Request& request) {
  try {
    take_pages(pool, request(), size);
  } catch (const OutOfMemoryError& error) {
    judge_refusal(pool, size, error, failures);
  } catch (const AsleepError&) {
    require(pools_[pool]->is_asleep(), "one that is awake says that it sleeps");
  } catch (const DriverError&) {
    require(driver_.failures() != failures, "a driver error without a failing call");
  }
}

void RandomWorld::pages(std::size_t pool, std::uint64_t first, std::uint64_t count, std::uint64_t failures) {
  const std::size_t page = pools_[pool]->page_size();
  const std::size_t offset = first % (kCapacity / page) * page;
  const std::size_t size = std::min((1 + count % 3) * page, kCapacity - offset);
  try {
    request_pages(pool, size, failures, [&] {
      memory_->allocate_pages(*pools_[pool], offset, size, stream_of(first));
      return offset;
    });
  } catch (const AlreadyMappedError&) {
    // True whenever the model says so; a pending free may hold pages besides.
  }
}

void RandomWorld::first_pages(std::size_t pool, std::uint64_t count, std::uint64_t failures) {
  const std::size_t size = (1 + count % 3) * pools_[pool]->page_size();
  request_pages(pool, size, failures,
                [&] { return memory_->allocate_first(*pools_[pool], size, stream_of(count)) - pools_[pool]->base(); });
}

void RandomWorld::free_page_range(std::size_t index) {
  const Pages range = page_ranges_[index];
  check_if_awake(as_block(range));
  memory_->deallocate_pages(*pools_[range.pool], range.offset, range.size);
  require(!pools_[range.pool]->is_mapped(range.offset, pools_[range.pool]->page_size()), "still mapped after free");
  page_ranges_[index] = page_ranges_.back();
  page_ranges_.pop_back();
}

void RandomWorld::run_threads(std::uint64_t seed, std::uint64_t steps) {
  constexpr std::size_t kThreads = 4;
  const std::uint64_t pressure = std::exchange(pressure_, 0);  // what it does is for one thread
  std::array<std::string, kThreads> wrong;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (std::size_t number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(seed * kThreads + number);
      std::vector<Live> mine;
      try {
        for (std::uint64_t k = 0; k < steps; ++k) thread_step(random, mine, number);
        while (!mine.empty()) free_of(mine, mine.size() - 1);
      } catch (const std::exception& error) {
        wrong[number] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pressure_ = pressure;
  for (const std::string& text : wrong) require(text.empty(), text);
}

void RandomWorld::free_of(std::vector<Live>& mine, std::size_t index) {
  check_content(mine[index]);
  require(DeviceMemory::free(space_, mine[index].address), "a live block is unknown");
  mine[index] = mine.back();
  mine.pop_back();
}

void RandomWorld::thread_step(std::mt19937_64& random, std::vector<Live>& mine, std::size_t number) {
  const std::uint64_t what = random() % 100;
  if (what < 50 && mine.size() < 12) {
    const std::size_t pool = random() % kPools;
    Live live{pool, 0, 1 + random() % (random() % 4 == 0 ? 5 * kMiB : 100 * kKiB),
              (number + 1) << 40U | random() % kGiB, nullptr};
    try {
      live.address = memory_->allocate(*pools_[pool], live.size, stream_of(number));
    } catch (const OutOfMemoryError&) {
      return;
    } catch (const DriverError&) {
      return;
    } catch (const AsleepError&) {
      return;
    }
    live.home = memory_->pool_at(live.address);
    check_no_former_owner(*live.home, live.address, extent(live.size));
    write(live);
    mine.push_back(live);
  } else if (what < 96) {
    if (!mine.empty()) free_of(mine, random() % mine.size());
  } else if (what < 98) {
    memory_->trim(*pools_[random() % kPools], 0);
  } else if (what < 99) {
    static_cast<void>(pools_[random() % kPools]->memory_stats());
  } else {
    memory_->empty_cache();
  }
}
}  // namespace vmm::testing
