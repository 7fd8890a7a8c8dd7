// The lossless code of memory that sleeps packed. It knows bytes; who keeps them, and where,
// is core/memory/packed_backup.
//
// Memory is seen as words of 16 bits, as if all of it were bf16. Weights fill the mantissa
// evenly, but of the 256 exponents they use a dozen. So of each word sign and mantissa are a
// byte, and the exponent is an index of 1 to 4 bits into a table of the most frequent ones;
// the last index says that it is not there: an escape, a byte in a list at the end. Normally
// distributed weights take 11.2 bits a word. Nothing has to know the type: each unit of
// memory is looked at, and what gets no smaller stays as it is.
//
// This one text says what the bytes mean. It is compiled here for the CPU, and from itself
// (packing.cpp) by NVRTC for the GPU: there a block of threads does a unit together, here a
// single lane does. So nothing is included, and what differs is in the first section.
#pragma once

#ifdef __CUDACC_RTC__
#define VMM_PACKING __device__ __forceinline__
#else
#define VMM_PACKING inline
#endif

namespace vmm::packing {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline constexpr u32 kUnitBytes = 32768;    // of memory, at most
inline constexpr u32 kBodyAlignment = 128;  // the GPU asks the bus for such lines
inline constexpr u32 kLanes = 512;
inline constexpr u32 kMostBits = 4;
inline constexpr u32 kMostExponents = 15;  // of 4 bits' 16 values one is the escape
inline constexpr u32 kGroupBytes = 16;     // 8 words: as many bytes of indices as an index has bits

// What is known of one unit.
struct alignas(16) Unit {
  u64 at;                        // of its memory, in all that was saved
  u32 body;                      // where it stands packed, in kBodyAlignment from Job::bodies on
  u16 size;                      // bytes of memory
  u16 escapes;                   // so many, at most
  u8 bits;                       // of an index; 0: the memory as it is
  u8 exponents[kMostExponents];  // by index
};
static_assert(sizeof(Unit) == 32);

// `count` units one after the other, of memory that is one stretch. Addresses are numbers.
struct Job {
  u64 units;  // of the first
  u64 count;
  u64 bodies;
  u64 memory;  // of what was saved from `at` on
  u64 at;
  u64 begin;  // of what was saved, only [begin, end) is unpacked: it lies in all of the units
  u64 end;
};

// survey: looks at the memory and says of each unit all but where its body is.
// pack: memory to bodies. Memory that has changed since the survey is packed as something
// else, but to no other place. unpack: bodies to memory.
enum class Step : u32 { survey, pack, unpack };

// ------------------------------------------------------ a block of threads, or one lane

inline constexpr u32 kLineBytes = 16;
struct alignas(kLineBytes) Line {
  u32 words[4];
};

// A block's shared memory.
struct Scratch {
  alignas(16) u8 image[kUnitBytes];  // a body
  Unit unit;
  u32 counts[256];             // by exponent
  u32 covered[kMostBits + 1];  // words whose exponents an index of so many bits reaches
  u32 sums[kLanes / 32];
  u8 index_of[256];  // by exponent
};

#ifdef __CUDACC_RTC__
VMM_PACKING u32 lane() { return threadIdx.x; }
VMM_PACKING u32 lanes() { return kLanes; }
// All have come here, and see what each has written.
VMM_PACKING void meet() { __syncthreads(); }
VMM_PACKING void add(u32* to, u32 value) { atomicAdd(to, value); }

// Of the values of all lanes before this one. All call it.
VMM_PACKING u32 sum_before(Scratch& scratch, u32 value) {
  const u32 within = lane() % 32;
  u32 sum = value;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0U, sum, step);
    if (within >= step) sum += other;
  }
  if (within == 31) scratch.sums[lane() / 32] = sum;
  meet();
  u32 before = sum - value;
  for (u32 warp = 0; warp < lane() / 32; ++warp) before += scratch.sums[warp];
  return before;
}

VMM_PACKING Line load(const u8* from) {
  if (reinterpret_cast<u64>(from) % kLineBytes == 0) return *reinterpret_cast<const Line*>(from);
  Line line = {};
  for (u32 k = 0; k < kLineBytes; ++k) line.words[k / 4] |= u32{from[k]} << 8 * (k % 4);
  return line;
}

VMM_PACKING void store(u8* to, const Line& line) {
  if (reinterpret_cast<u64>(to) % kLineBytes == 0) {
    *reinterpret_cast<Line*>(to) = line;
    return;
  }
  for (u32 k = 0; k < kLineBytes; ++k) to[k] = static_cast<u8>(line.words[k / 4] >> 8 * (k % 4));
}

// Of a group, which are in the image: bytes one by one would meet in the same banks.
VMM_PACKING u64 load_rests(const u8* from) { return *reinterpret_cast<const u64*>(from); }
VMM_PACKING void store_rests(u8* to, u64 rests) { *reinterpret_cast<u64*>(to) = rests; }
#else
VMM_PACKING u32 lane() { return 0; }
VMM_PACKING u32 lanes() { return 1; }
VMM_PACKING void meet() {}
VMM_PACKING void add(u32* to, u32 value) { *to += value; }
VMM_PACKING u32 sum_before(Scratch& /*scratch*/, u32 /*value*/) { return 0; }

VMM_PACKING Line load(const u8* from) {
  Line line;
  __builtin_memcpy(&line, from, sizeof(line));
  return line;
}
VMM_PACKING void store(u8* to, const Line& line) { __builtin_memcpy(to, &line, sizeof(line)); }
VMM_PACKING u64 load_rests(const u8* from) {
  u64 rests = 0;
  __builtin_memcpy(&rests, from, sizeof(rests));
  return rests;
}
VMM_PACKING void store_rests(u8* to, u64 rests) { __builtin_memcpy(to, &rests, sizeof(rests)); }
#endif

// Offsets in a unit have 16 bits.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

// Four lines a lane are on their way at once, as the bus takes its time.
VMM_PACKING void copy(u8* to, const u8* from, u32 bytes) {
  constexpr u32 kAtOnce = 4;
  const u32 count = bytes / kLineBytes;
  for (u32 k = lane(); k < count; k += kAtOnce * lanes()) {
    Line line[kAtOnce];
    for (u32 n = 0; n < kAtOnce; ++n) {
      if (k + n * lanes() < count) line[n] = load(from + (k + n * lanes()) * kLineBytes);
    }
    for (u32 n = 0; n < kAtOnce; ++n) {
      if (k + n * lanes() < count) store(to + (k + n * lanes()) * kLineBytes, line[n]);
    }
  }
  for (u32 k = count * kLineBytes + lane(); k < bytes; k += lanes()) to[k] = from[k];
}

// -------------------------------------------------------------------------- the bytes

// Exponents that an index of `bits` reaches; it is the escape's index too.
VMM_PACKING u32 escape_of(u32 bits) { return (1U << bits) - 1; }

VMM_PACKING u32 word_of(const Line& line, u32 k) { return line.words[k / 2] >> 16 * (k % 2) & 0xffff; }
VMM_PACKING u32 exponent_of(u32 word) { return word >> 7 & 0xff; }
VMM_PACKING u32 rest_of(u32 word) { return (word >> 8 & 0x80) | (word & 0x7f); }
VMM_PACKING u32 word_from(u32 exponent, u32 rest) { return (rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f); }

// A body: the rests of all words, then their indices, `bits` bytes for each group, then escapes.
VMM_PACKING u32 indices_at(u32 size) { return size / 2; }
VMM_PACKING u32 escapes_at(u32 size, u32 bits) { return size / 2 + size / kGroupBytes * bits; }
VMM_PACKING u32 body_bytes(u32 size, u32 bits, u32 escapes) {
  return bits == 0 ? size : escapes_at(size, bits) + escapes;
}
VMM_PACKING u32 body_lines(u32 size, u32 bits, u32 escapes) {
  return (body_bytes(size, bits, escapes) + kBodyAlignment - 1) / kBodyAlignment;
}

struct Groups {
  u32 begin;
  u32 end;
};
// Contiguous groups for each lane, so that its escapes stand together.
VMM_PACKING Groups own_groups(u32 size) {
  const u32 count = size / kGroupBytes;
  const u32 each = (count + lanes() - 1) / lanes();
  const u32 begin = lane() * each < count ? lane() * each : count;
  return {begin, begin + each < count ? begin + each : count};
}

VMM_PACKING u64 indices_of(const u8* indices, u32 group, u32 bits) {
  u64 found = 0;
  for (u32 k = 0; k < bits; ++k) found |= u64{indices[group * bits + k]} << 8 * k;
  return found;
}

// -------------------------------------------------------------------------- the steps

VMM_PACKING Unit* unit_of(const Job& job, u64 number) { return reinterpret_cast<Unit*>(job.units) + number; }
VMM_PACKING u8* memory_of(const Job& job, const Unit& unit) {
  return reinterpret_cast<u8*>(job.memory + (unit.at - job.at));
}
VMM_PACKING u8* body_of(const Job& job, const Unit& unit) {
  return reinterpret_cast<u8*>(job.bodies + u64{unit.body} * kBodyAlignment);
}

VMM_PACKING void survey_unit(const Job& job, u64 number, Scratch& scratch) {
  Unit& unit = scratch.unit;
  if (lane() == 0) {
    unit = *unit_of(job, number);
    for (u8& exponent : unit.exponents) exponent = 0;
    for (u32 bits = 0; bits <= kMostBits; ++bits) scratch.covered[bits] = 0;
  }
  for (u32 k = lane(); k < 256; k += lanes()) scratch.counts[k] = 0;
  meet();
  const u8* const memory = memory_of(job, unit);
  for (u32 group = lane(); group < unit.size / kGroupBytes; group += lanes()) {
    const Line line = load(memory + group * kGroupBytes);
    u32 latest = exponent_of(word_of(line, 0));
    u32 times = 1;  // equal ones are counted at once
    for (u32 k = 1; k < 8; ++k) {
      const u32 exponent = exponent_of(word_of(line, k));
      if (exponent != latest) {
        add(&scratch.counts[latest], times);
        latest = exponent;
        times = 0;
      }
      ++times;
    }
    add(&scratch.counts[latest], times);
  }
  meet();
  for (u32 exponent = lane(); exponent < 256; exponent += lanes()) {
    const u32 count = scratch.counts[exponent];
    if (count == 0) continue;
    u32 rank = 0;
    for (u32 other = 0; other < 256; ++other) {
      const u32 others = scratch.counts[other];
      if (others > count || (others == count && other < exponent)) ++rank;
    }
    if (rank >= kMostExponents) continue;
    unit.exponents[rank] = static_cast<u8>(exponent);
    for (u32 bits = 1; bits <= kMostBits; ++bits) {
      if (rank < escape_of(bits)) add(&scratch.covered[bits], count);
    }
  }
  meet();
  if (lane() == 0) {
    unit.bits = 0;
    unit.escapes = 0;
    u32 fewest = body_lines(unit.size, 0, 0);
    for (u32 bits = 1; bits <= kMostBits && unit.size % kGroupBytes == 0; ++bits) {
      const u32 escapes = unit.size / 2 - scratch.covered[bits];
      const u32 lines = body_lines(unit.size, bits, escapes);
      if (lines >= fewest) continue;
      fewest = lines;
      unit.bits = static_cast<u8>(bits);
      unit.escapes = static_cast<u16>(escapes);
    }
    *unit_of(job, number) = unit;
  }
  meet();
}

VMM_PACKING void pack_unit(const Job& job, u64 number, Scratch& scratch) {
  Unit& unit = scratch.unit;
  if (lane() == 0) unit = *unit_of(job, number);
  meet();
  const u32 size = unit.size;
  const u32 bits = unit.bits;
  const u8* const memory = memory_of(job, unit);
  if (bits == 0) {
    copy(body_of(job, unit), memory, size);
    meet();
    return;
  }
  const u32 escape = escape_of(bits);
  for (u32 exponent = lane(); exponent < 256; exponent += lanes()) {
    u32 index = 0;
    while (index < escape && unit.exponents[index] != exponent) ++index;
    scratch.index_of[exponent] = static_cast<u8>(index);
  }
  meet();
  const Groups own = own_groups(size);
  u32 escapes = 0;
  for (u32 group = own.begin; group < own.end; ++group) {
    const Line line = load(memory + group * kGroupBytes);
    for (u32 k = 0; k < 8; ++k) escapes += scratch.index_of[exponent_of(word_of(line, k))] == escape ? 1 : 0;
  }
  u32 next = sum_before(scratch, escapes);
  u8* const image = scratch.image;
  for (u32 group = own.begin; group < own.end; ++group) {
    const Line line = load(memory + group * kGroupBytes);
    u64 rests = 0;
    u64 indices = 0;
    for (u32 k = 0; k < 8; ++k) {
      const u32 word = word_of(line, k);
      const u32 index = scratch.index_of[exponent_of(word)];
      rests |= u64{rest_of(word)} << 8 * k;
      indices |= u64{index} << bits * k;
      if (index != escape) continue;
      if (next < unit.escapes) image[escapes_at(size, bits) + next] = static_cast<u8>(exponent_of(word));
      ++next;
    }
    store_rests(image + group * 8, rests);
    for (u32 k = 0; k < bits; ++k) image[indices_at(size) + group * bits + k] = static_cast<u8>(indices >> 8 * k);
  }
  meet();
  copy(body_of(job, unit), image, body_bytes(size, bits, unit.escapes));
  meet();
}

VMM_PACKING void unpack_unit(const Job& job, u64 number, Scratch& scratch) {
  Unit& unit = scratch.unit;
  if (lane() == 0) unit = *unit_of(job, number);
  meet();
  const u32 size = unit.size;
  const u32 bits = unit.bits;
  u8* const memory = memory_of(job, unit);
  const u32 begin = static_cast<u32>(job.begin > unit.at ? job.begin - unit.at : 0);
  const u32 end = static_cast<u32>(job.end - unit.at < size ? job.end - unit.at : size);
  if (bits == 0) {
    copy(memory + begin, body_of(job, unit) + begin, end - begin);
    meet();
    return;
  }
  u8* const image = scratch.image;
  copy(image, body_of(job, unit), body_bytes(size, bits, unit.escapes));
  meet();
  const u32 escape = escape_of(bits);
  const Groups own = own_groups(size);
  u32 escapes = 0;
  for (u32 group = own.begin; group < own.end; ++group) {
    const u64 indices = indices_of(image + indices_at(size), group, bits);
    for (u32 k = 0; k < 8; ++k) escapes += (indices >> bits * k & escape) == escape ? 1 : 0;
  }
  u32 next = sum_before(scratch, escapes);
  for (u32 group = own.begin; group < own.end; ++group) {
    const u64 indices = indices_of(image + indices_at(size), group, bits);
    const u64 rests = load_rests(image + group * 8);
    Line line = {};
    for (u32 k = 0; k < 8; ++k) {
      const u32 index = static_cast<u32>(indices >> bits * k) & escape;
      u32 exponent = 0;
      if (index != escape) {
        exponent = unit.exponents[index];
      } else {
        if (next < unit.escapes) exponent = image[escapes_at(size, bits) + next];
        ++next;
      }
      line.words[k / 2] |= word_from(exponent, static_cast<u32>(rests >> 8 * k) & 0xff) << 16 * (k % 2);
    }
    const u32 at = group * kGroupBytes;
    if (begin <= at && at + kGroupBytes <= end) {
      store(memory + at, line);
      continue;
    }
    for (u32 k = 0; k < kGroupBytes; ++k) {
      if (begin <= at + k && at + k < end) memory[at + k] = static_cast<u8>(line.words[k / 4] >> 8 * (k % 4));
    }
  }
  meet();
}

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

#ifdef __CUDACC_RTC__
// clang-format off
#define VMM_PACKING_KERNEL(step)                                                      \
  extern "C" __global__ void __launch_bounds__(kLanes) vmm_##step(const Job job) {    \
    __shared__ Scratch scratch;                                                       \
    for (u64 k = blockIdx.x; k < job.count; k += gridDim.x) step##_unit(job, k, scratch); \
  }
// clang-format on
VMM_PACKING_KERNEL(survey)
VMM_PACKING_KERNEL(pack)
VMM_PACKING_KERNEL(unpack)
#else
// On the CPU, where all that `job` names is there.
void run(Step step, const Job& job, Scratch& scratch);

// This file, for NVRTC. Its kernels are vmm_survey, vmm_pack and vmm_unpack; each takes a Job,
// and blocks of kLanes threads.
const char* text();
#endif

}  // namespace vmm::packing

#ifdef VMM_PACKING_TEXT
// packing.cpp alone. The path is the compiler's own, so it holds wherever that runs.
asm(".pushsection .rodata\n"
    ".globl vmm_packing_text\n"
    ".hidden vmm_packing_text\n"
    "vmm_packing_text:\n"
    ".incbin \"" __FILE__
    "\"\n"
    ".byte 0\n"
    ".popsection");
#endif
