// The contract suite on the drivers that need no GPU: host memory, with one
// device and with two, and the scripted driver around it.
#include "contract/driver_contract.h"

#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "driver/host_driver.h"
#include "support/scripted_driver.h"

namespace vmm::testing {
namespace {

struct Subject {
  const char* name;
  HostDriverOptions options;
  bool scripted;
};

const Subject kSubjects[] = {
    {"host", {2 * kMiB, 4 * kGiB, 1}, false},
    {"host_64KiB_pages", {64 * kKiB, kGiB, 1}, false},
    {"host_two_devices", {2 * kMiB, 4 * kGiB, 2}, false},
    {"scripted_host", {2 * kMiB, 4 * kGiB, 2}, true},
};

struct Param {
  const Subject* subject;
  const ContractCase* contract_case;
};

std::ostream& operator<<(std::ostream& out, const Param& param) {
  return out << param.subject->name << '.' << param.contract_case->name;
}

std::vector<Param> params() {
  std::vector<Param> all;
  for (const Subject& subject : kSubjects) {
    for (const ContractCase& contract_case : driver_contract_cases()) all.push_back({&subject, &contract_case});
  }
  return all;
}

class DriverContract : public ::testing::TestWithParam<Param> {};

TEST_P(DriverContract, Holds) {
  HostDriver host(GetParam().subject->options);
  ScriptedDriver scripted(host);
  Driver& driver = GetParam().subject->scripted ? static_cast<Driver&>(scripted) : host;
  ContractOptions options;
  options.stream_a = reinterpret_cast<Stream>(0xA);
  options.stream_b = reinterpret_cast<Stream>(0xB);
#ifdef VMM_SANITIZED
  options.large_reservation = 64 * kGiB;  // their shadow takes the rest of the address space
#endif
  MemoryInfo before;
  ASSERT_TRUE(driver.memory_info(0, &before).ok());
  try {
    GetParam().contract_case->run(driver, options);
  } catch (const ContractSkip& skip) {
    GTEST_SKIP() << skip.what();
  } catch (const ContractFailure& failure) {
    FAIL() << failure.what();
  }
  EXPECT_EQ(scripted.leaks(), "");
  MemoryInfo after;
  ASSERT_TRUE(driver.memory_info(0, &after).ok());
  EXPECT_EQ(after.free, before.free);
}

INSTANTIATE_TEST_SUITE_P(All, DriverContract, ::testing::ValuesIn(params()),
                         [](const ::testing::TestParamInfo<Param>& which) {
                           return std::string(which.param.subject->name) + "_" + which.param.contract_case->name;
                         });

}  // namespace
}  // namespace vmm::testing
