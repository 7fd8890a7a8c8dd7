// Copies, fills, fences, and all of it from several threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>

#include "base/host_pages.h"
#include "contract/contract_lab.h"
#include "driver/packing.h"

namespace vmm::testing {
namespace {

void copies_and_fills_of_odd_sizes(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = align_up(kMiB, lab.granule());  // room for the largest, twice
  const Address at = lab.reserve(2 * g);
  lab.map(at, lab.create(g));
  lab.map(at + g, lab.create(g));
  for (const std::size_t size : {1U, 3U, 4U, 7U, 8U, 511U, 512U, 4097U, 65537U}) {
    for (const std::size_t skew : {0U, 1U, 4U, 13U}) {
      lab.fill(at, 0x11, 2 * g);
      const Address middle = at + g - size / 2 - skew;  // over the border
      lab.fill(middle, 0x22, size);
      CONTRACT_FILLED(lab, middle - 64, 64, 0x11);
      CONTRACT_FILLED(lab, middle, size, 0x22);
      CONTRACT_FILLED(lab, middle + size, 64, 0x11);
      const Bytes bytes = pattern(size, size + skew);
      lab.write(middle, bytes);
      CONTRACT_OK(driver.copy_async(options.device, at + skew, middle, size, nullptr));
      CONTRACT_CHECK(lab.read(at + skew, size) == bytes, size, skew);
      CONTRACT_FILLED(lab, at + skew + size, 64, 0x11);
    }
  }
}

void empty_copies_and_fills_are_refused(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const Address at = lab.reserve(lab.granule());
  lab.map(at, lab.create(lab.granule()));
  CONTRACT_REFUSED(driver.copy_async(options.device, at, at + 64, 0, nullptr));
  CONTRACT_REFUSED(driver.fill_async(options.device, at, 1, 0, nullptr));
  std::uint8_t byte = 0;
  CONTRACT_REFUSED(driver.read(options.device, &byte, at, 0));
}

// It waits for no stream's work, and its bytes need no alignment.
void what_is_read_is_there_at_once(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(2 * g);
  lab.map(at, lab.create(g));
  lab.map(at + g, lab.create(g));
  for (std::uint8_t round = 1; round < 5; ++round) {
    lab.fill(at, round, 2 * g);
    for (const std::size_t size : {std::size_t{1}, std::size_t{511}, std::size_t{4096}}) {
      std::vector<std::uint8_t> bytes(size, 0);
      CONTRACT_OK(driver.read(options.device, bytes.data(), at + g - size / 2, size));
      CONTRACT_CHECK(bytes == std::vector<std::uint8_t>(size, round), size, round);
    }
  }
}

void fences_pass(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const Address at = lab.reserve(lab.granule());
  lab.map(at, lab.create(lab.granule()));
  const Fence fence = lab.fence();
  CONTRACT_OK(driver.query(fence));  // never recorded
  CONTRACT_OK(driver.wait(fence));
  for (const Stream stream : {Stream{nullptr}, options.stream_a, options.stream_b}) {
    for (std::uint8_t round = 1; round < 5; ++round) {
      CONTRACT_OK(driver.fill_async(options.device, at, round, lab.granule(), stream));
      CONTRACT_OK(driver.record(fence, stream));
      const Status asked = driver.query(fence);
      CONTRACT_CHECK(asked.ok() || asked.code() == StatusCode::not_ready, asked.text());
      CONTRACT_OK(driver.wait(fence));
      CONTRACT_OK(driver.query(fence));
    }
  }
  CONTRACT_OK(driver.synchronize(options.device));
  CONTRACT_FILLED(lab, at, lab.granule(), 4);
}

void unknown_fences_are_refused(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const Fence gone = lab.fence();
  lab.destroy(gone);
  const Fence other = lab.fence();  // may stand where the first one stood
  for (const Fence fence : {gone, Fence{nullptr}}) {
    CONTRACT_REFUSED(driver.destroy_fence(fence));
    CONTRACT_REFUSED(driver.record(fence, nullptr));
    CONTRACT_REFUSED(driver.query(fence));
    CONTRACT_REFUSED(driver.wait(fence));
    CONTRACT_REFUSED(driver.stream_wait(options.device, nullptr, fence));
  }
  CONTRACT_OK(driver.query(other));
}

void many_fences(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  std::vector<Fence> fences;
  for (int k = 0; k < 3000; ++k) fences.push_back(lab.fence());
  CONTRACT_CHECK(std::set<Fence>(fences.begin(), fences.end()).size() == fences.size());
  for (const Fence fence : fences) CONTRACT_OK(driver.record(fence, options.stream_a));
  CONTRACT_OK(driver.wait(fences.back()));
  for (const Fence fence : fences) CONTRACT_OK(driver.query(fence));
  for (const Fence fence : fences) lab.destroy(fence);
}

void waiting_for_the_device_covers_all_streams(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(2 * g);
  lab.map(at, lab.create(g));
  lab.map(at + g, lab.create(g));
  const Fence a = lab.fence();
  const Fence b = lab.fence();
  for (std::uint8_t round = 1; round < 20; ++round) {
    CONTRACT_OK(driver.fill_async(options.device, at, round, g, options.stream_a));
    CONTRACT_OK(driver.record(a, options.stream_a));
    CONTRACT_OK(driver.fill_async(options.device, at + g, round, g, options.stream_b));
    CONTRACT_OK(driver.record(b, options.stream_b));
    CONTRACT_OK(driver.synchronize(options.device));
    CONTRACT_OK(driver.query(a));
    CONTRACT_OK(driver.query(b));
    CONTRACT_FILLED(lab, at, 2 * g, round);
  }
}

void streams_wait_for_fences(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t size = align_up(16 * kMiB, lab.granule());
  const Address at = lab.reserve(2 * size);
  lab.map(at, lab.create(size));
  lab.map(at + size, lab.create(size));
  const Fence fence = lab.fence();
  CONTRACT_OK(driver.stream_wait(options.device, options.stream_b, fence));  // never recorded: nothing to wait for
  for (std::uint8_t round = 1; round < 20; ++round) {
    CONTRACT_OK(driver.fill_async(options.device, at, round, size, options.stream_a));
    CONTRACT_OK(driver.record(fence, options.stream_a));
    CONTRACT_OK(driver.stream_wait(options.device, options.stream_b, fence));
    CONTRACT_OK(driver.copy_async(options.device, at + size, at, size, options.stream_b));
    CONTRACT_OK(driver.record(fence, options.stream_b));
    CONTRACT_OK(driver.stream_wait(options.device, options.stream_a, fence));
    CONTRACT_OK(driver.wait(fence));
    CONTRACT_FILLED(lab, at + size, size, round);
  }
}

// Copies on a stream of one's own, to plain memory that is pinned and that is not.
void own_streams_copy_to_pinned_memory(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = align_up(kMiB, lab.granule());
  const Address at = lab.reserve(g);
  lab.map(at, lab.create(g));
  Stream own = nullptr;
  CONTRACT_OK(driver.create_stream(options.device, &own));
  CONTRACT_CHECK(own != nullptr && own != options.stream_a, "a stream of its own");
  for (const bool is_pinned : {false, true}) {
    const ZeroPages pages(g);
    const auto host = reinterpret_cast<Address>(pages.begin());
    std::fill_n(pages.begin(), g, std::byte{0});
    if (is_pinned) CONTRACT_OK(driver.pin_host(host, g));
    lab.write(at, pattern(g, 7));
    CONTRACT_OK(driver.copy_async(options.device, host, at, g, own));
    const Fence fence = lab.fence();
    CONTRACT_OK(driver.record(fence, own));
    CONTRACT_OK(driver.wait(fence));
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(pages.begin());
    CONTRACT_CHECK(Bytes(bytes, bytes + g) == pattern(g, 7), is_pinned);
    lab.fill(at, 0, g);
    CONTRACT_OK(driver.copy_async(options.device, at, host, g, own));
    CONTRACT_OK(driver.record(fence, own));
    CONTRACT_OK(driver.wait(fence));
    CONTRACT_CHECK(lab.read(at, g) == pattern(g, 7), is_pinned);
    if (is_pinned) CONTRACT_OK(driver.unpin_host(host));
  }
  CONTRACT_OK(driver.destroy_stream(options.device, own));
}

// A device packs as the CPU does: what one has packed the other unpacks.
void what_is_packed_comes_back(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  if (!driver.missing_packing(options.device).empty()) return;  // no NVRTC where there is no torch
  const std::size_t g = align_up(kMiB, lab.granule());
  const Address at = lab.reserve(g);
  lab.map(at, lab.create(g));
  Bytes memory = pattern(g, 7);  // half of it as weights are, the rest anything
  for (std::size_t k = 1; k < g / 2; k += 2)
    memory[k] = static_cast<unsigned char>(0x3e + memory[k] % 3 - (memory[k] % 97 == 0 ? 9 : 0));
  lab.write(at, memory);

  // A table with a unit that is short and one that is odd, and bodies.
  const ZeroPages pages(2 * g);
  std::fill_n(pages.begin(), 2 * g, std::byte{0});
  const auto host = reinterpret_cast<Address>(pages.begin());
  CONTRACT_OK(driver.pin_host(host, 2 * g));
  auto* const units = reinterpret_cast<packing::Unit*>(pages.begin());
  packing::Job job{host, 0, host, at, 0, 0, g};
  for (std::size_t done = 0; done < g; ++job.count) {
    const std::size_t most = job.count == 3 ? 4096 : job.count == 5 ? 1001 : packing::kUnitBytes;
    const std::size_t size = std::min(most, g - done);
    units[job.count] = {done, 0, static_cast<packing::u16>(size), 0, 0, {}};
    done += size;
  }
  const auto run = [&](bool on_device, packing::Step step, Address to) {
    packing::Job mine = job;
    mine.memory = to;
    if (!on_device) {
      packing::run(step, mine, *std::make_unique<packing::Scratch>());
      return;
    }
    const Fence fence = lab.fence();
    CONTRACT_OK(driver.pack_async(options.device, step, mine, options.stream_b));
    CONTRACT_OK(driver.record(fence, options.stream_b));
    CONTRACT_OK(driver.wait(fence));
  };
  run(true, packing::Step::survey, at);
  packing::u32 line = 64 * 1024 / packing::kBodyAlignment;
  for (std::size_t k = 0; k < job.count; ++k) {
    packing::Unit by_device = units[k];
    packing::Job one = job;
    one.units = reinterpret_cast<Address>(&units[k]);
    one.count = 1;
    one.memory = reinterpret_cast<Address>(memory.data());
    packing::run(packing::Step::survey, one, *std::make_unique<packing::Scratch>());
    CONTRACT_CHECK(std::memcmp(&by_device, &units[k], sizeof(by_device)) == 0, "unit", k, "is another on the CPU");
    units[k].body = line;
    line += packing::body_lines(units[k].size, units[k].bits, units[k].escapes);
  }
  CONTRACT_CHECK(line * packing::kBodyAlignment < g + 64 * 1024, "it gets smaller");
  for (const bool packs : {true, false}) {
    Bytes copy = memory;
    std::fill(pages.begin() + 64 * 1024, pages.begin() + 2 * g, std::byte{0x5a});
    run(packs, packing::Step::pack, packs ? at : reinterpret_cast<Address>(copy.data()));
    for (const bool unpacks : {true, false}) {
      std::fill(copy.begin(), copy.end(), 0);
      lab.fill(at, 0, g);
      run(unpacks, packing::Step::unpack, unpacks ? at : reinterpret_cast<Address>(copy.data()));
      CONTRACT_CHECK((unpacks ? lab.read(at, g) : copy) == memory, packs, unpacks);
    }
    lab.write(at, memory);
  }
  // A part of it, which begins and ends within units; and an odd address.
  lab.fill(at, 0, g);
  job.begin = 1000;
  job.end = g - 333;
  run(true, packing::Step::unpack, at);
  const Bytes part = lab.read(at, g);
  for (std::size_t k = 0; k < g; ++k) {
    const bool is_in = k >= job.begin && k < job.end;
    CONTRACT_CHECK(part[k] == (is_in ? memory[k] : 0), k);
  }
  job.begin = 0;
  job.count = 1;
  job.end = packing::kUnitBytes;
  run(true, packing::Step::unpack, at + 3);
  CONTRACT_CHECK(lab.read(at + 3, packing::kUnitBytes) == Bytes(memory.begin(), memory.begin() + packing::kUnitBytes));
  job.count = 0;
  CONTRACT_REFUSED(driver.pack_async(options.device, packing::Step::pack, job, nullptr));
  CONTRACT_OK(driver.unpin_host(host));
}

// What a thread does in its own stretch is not disturbed by the others.
void threads_do_not_disturb_each_other(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const auto threads = static_cast<std::size_t>(options.threads);
  const Address at = lab.reserve(4 * threads * g);
  std::vector<std::string> failed(threads);
  std::vector<std::thread> running;
  for (std::size_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      try {
        for (std::size_t round = 0; round < 20; ++round) {
          Lab own(driver, options);
          const Address mine = at + 4 * t * g;
          const std::uint64_t seed = t * 1000 + round;
          const ChunkHandle chunk = own.create(g);
          own.map(mine, chunk);
          own.map(mine + 2 * g, own.create(2 * g));
          own.write(mine, pattern(4096, seed));
          CONTRACT_FILLED(own, mine + 2 * g, 2 * g, 0);
          own.map(mine + g, chunk);
          own.unmap(mine, g);
          own.reserve(g, 16 * g);
          const Fence fence = own.fence();
          CONTRACT_OK(driver.record(fence, options.stream_a));
          CONTRACT_OK(driver.wait(fence));
          CONTRACT_CHECK(own.read(mine + g, 4096) == pattern(4096, seed), "thread", t, "round", round);
        }
      } catch (const std::exception& failure) {
        failed[t] = failure.what();
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (const std::string& what : failed) CONTRACT_CHECK(what.empty(), what);
}

}  // namespace

std::vector<ContractCase> content_cases() {
  return {
      {"copies_and_fills_of_odd_sizes", copies_and_fills_of_odd_sizes},
      {"empty_copies_and_fills_are_refused", empty_copies_and_fills_are_refused},
      {"what_is_read_is_there_at_once", what_is_read_is_there_at_once},
      {"fences_pass", fences_pass},
      {"unknown_fences_are_refused", unknown_fences_are_refused},
      {"many_fences", many_fences},
      {"waiting_for_the_device_covers_all_streams", waiting_for_the_device_covers_all_streams},
      {"streams_wait_for_fences", streams_wait_for_fences},
      {"own_streams_copy_to_pinned_memory", own_streams_copy_to_pinned_memory},
      {"what_is_packed_comes_back", what_is_packed_comes_back},
      {"threads_do_not_disturb_each_other", threads_do_not_disturb_each_other},
  };
}

}  // namespace vmm::testing
