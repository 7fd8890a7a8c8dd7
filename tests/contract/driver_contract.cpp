#include "contract/driver_contract.h"

namespace vmm::testing {

const std::vector<ContractCase>& driver_contract_cases() {
  static const std::vector<ContractCase> all = [] {
    std::vector<ContractCase> cases = space_cases();
    for (const auto& part : {mapping_cases(), content_cases()}) cases.insert(cases.end(), part.begin(), part.end());
    return cases;
  }();
  return all;
}

}  // namespace vmm::testing
