// What every driver promises, as cases that anything can run: no test
// framework, so that a GPU server with a compiler is enough. It owns the cases;
// it never knows which driver it is run on.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/driver.h"

namespace vmm::testing {

struct ContractOptions {
  int device = 0;
  // Two different streams of the device, both usable; nullptr is the default
  // stream and may be one of them.
  Stream stream_a = nullptr;
  Stream stream_b = nullptr;
  std::size_t large_reservation = 8 * kTiB;  // bytes; sanitizers allow less
  std::size_t large_alignment = kGiB;        // bytes
  int threads = 4;
};

class ContractFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A capability that the case needs is missing.
class ContractSkip : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ContractCase {
  const char* name;
  // Throws ContractFailure or ContractSkip. Leaves nothing behind either way.
  void (*run)(Driver&, const ContractOptions&);
};

const std::vector<ContractCase>& driver_contract_cases();

// The parts of the list, one a file.
std::vector<ContractCase> space_cases();    // devices, reservations, chunks
std::vector<ContractCase> mapping_cases();  // map, unmap, access, sharing
std::vector<ContractCase> content_cases();  // copies, fills, fences, threads

}  // namespace vmm::testing
